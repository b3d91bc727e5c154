"""A fake target served over gRPC from the test process, with an index and real orchestrators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bough.client import Client
from bough.config.processes import OrchestratorConfig, TargetConfig, parse
from bough.pb import common_pb2, target_pb2
from bough.processes.launch import Cluster, Settings
from bough.protocol import codec
from bough.protocol.codec_fields import to_fields
from bough.protocol.generation import Finished, GenerateOptions, Prompt, TextPrompt, WorkerInfo
from bough.registry.records import WorkerRecord
from bough.registry.registry import Registry, registered
from bough.rpc.server import Served, serving
from bough.rpc.services import TARGET, add_service
from bough.tokenization.vocabulary import TokenizerFiles
from orchestrator.assembly import assembled
from orchestrator.serving.requests import Requests
from orchestrator.serving.tenants import Callers
from tests.fakes.waiting import until

MAX_CONTEXT = 100_000
TOKEN = 65  # the fake target's only answer
PROMPT = TextPrompt("hello")
LONG = GenerateOptions(max_tokens=MAX_CONTEXT // 2, temperature=0.0)
SHORT = replace(LONG, max_tokens=3)
Context = grpc.aio.ServicerContext[Any, Any]


def tokenizer_files() -> TokenizerFiles:
    """A tokenizer whose tokens are single bytes, and one of four characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "abcd"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return TokenizerFiles(tokenizer.to_str().encode(), template, ())


@dataclass
class FakeTarget:
    """Servicer of bough.v1.Target that answers every call with the same token, once `may_answer` is set."""

    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    sweep_seconds: float = 0.0
    refusal: Exception | None = None  # raised instead of an answer
    num_verified: int = 0
    asked: list[str] = field(default_factory=list)  # sessions, in order of their calls
    cancelled: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    time_limits: list[float] = field(default_factory=list)  # remaining seconds of each call, as received
    files: TokenizerFiles = field(default_factory=tokenizer_files)

    async def GetServerInfo(self, request: common_pb2.GetServerInfoRequest, context: Context) -> common_pb2.WorkerInfo:
        info = WorkerInfo(
            "target",
            "target-fake",
            "fake",
            "",
            "",
            self.files.fingerprint,
            257,
            MAX_CONTEXT,
            max_nodes=8,
            max_sessions=99,
        )
        return common_pb2.WorkerInfo(**to_fields(info))

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.TokenizerChunk]:
        for chunk in codec.tokenizer_to_wire(self.files):
            yield chunk

    async def Verify(self, request: target_pb2.VerifyRequest, context: Context) -> target_pb2.VerifyReply:
        session_id = request.context.session_id
        self.asked.append(session_id)
        self.time_limits.append(context.time_remaining())
        if self.refusal is not None:
            raise self.refusal
        try:
            await self.may_answer.wait()
            await asyncio.sleep(self.sweep_seconds)
        except asyncio.CancelledError:
            self.cancelled.append(session_id)
            raise
        self.num_verified += 1
        held = request.context.context_start + len(request.context.tokens) + 1
        logprobs = []
        if request.sampling.HasField("logprobs"):
            one = common_pb2.TokenLogprob(token_id=TOKEN, logprob=-1.0)
            logprobs = [common_pb2.PositionLogprobs(token=one, top=[one] * request.sampling.logprobs)]
        cached = request.context.context_start
        return target_pb2.VerifyReply(bonus_token=TOKEN, held_length=held, logprobs=logprobs, cached_length=cached)

    async def Release(self, request: common_pb2.ReleaseRequest, context: Context) -> common_pb2.ReleaseReply:
        self.released.append(request.session_id)
        return common_pb2.ReleaseReply()


@dataclass
class Stage:
    """The fake target, registered in a namespace of an index."""

    index_url: str
    namespace: str
    registry: Registry
    target: FakeTarget


@asynccontextmanager
async def staged(folder: Path, max_connection_age: float = 0.0) -> AsyncIterator[Stage]:
    """Run an index and a fake target during the block; `max_connection_age` is the target's limit in seconds."""
    nothing = Settings(parse(TargetConfig, "t", ["--model", "x"], {}), None, parse(OrchestratorConfig, "o", [], {}))
    cluster = Cluster(nothing, folder)
    cluster.start_index()
    try:
        async with staged_at(cluster.index_url, max_connection_age=max_connection_age) as stage:
            yield stage
    finally:
        cluster.stop_all()


@asynccontextmanager
async def staged_at(index_url: str, namespace: str = "bough", max_connection_age: float = 0.0) -> AsyncIterator[Stage]:
    """Run a fake target during the block, registered in its own namespace."""
    registry, target = Registry(index_url, namespace), FakeTarget()
    target.may_answer.set()
    try:
        await registry.wait()
        add = partial(add_service, TARGET, target)
        serves = serving("127.0.0.1", 0, TARGET.full_name, add, None, None, 0.0, max_connection_age)
        async with serves as served:
            record = WorkerRecord("target", "target-fake", f"127.0.0.1:{served.port}")
            async with registered(registry, lambda: record):
                yield Stage(index_url, namespace, registry, target)
    finally:
        await registry.close()


@dataclass
class Orchestrator:
    """An orchestrator in this process, and a client of it."""

    requests: Requests
    served: Served
    client: Client
    callers: Callers

    @property
    def address(self) -> str:
        return self.client.address


def config_of(stage: Stage, *flags: str) -> OrchestratorConfig:
    """Settings of an orchestrator that uses the stage's index and no draft."""
    index = ["--index-url", stage.index_url, "--namespace", stage.namespace]
    everywhere = [*index, "--draft", "none", "--port", "0", "--metrics-port", "-1"]
    return parse(OrchestratorConfig, "o", [*everywhere, *flags], {})


@asynccontextmanager
async def orchestrating(stage: Stage, *flags: str) -> AsyncIterator[Orchestrator]:
    """Run an orchestrator that knows the fake target and uses no draft."""
    async with assembled(config_of(stage, *flags), asyncio.Event()) as assembly:
        await until(lambda: assembly.directory.has_target)
        async with Client(f"127.0.0.1:{assembly.port}", patience_seconds=0.0) as client:
            yield Orchestrator(assembly.requests, assembly.served, client, assembly.callers)
        await until(lambda: not assembly.requests.loads().num_requests_running)


async def finish(orchestrator: Orchestrator, prompt: Prompt = PROMPT, options: GenerateOptions = SHORT) -> Finished:
    """Send a request over gRPC and return its last event."""
    events = [event async for event in orchestrator.client.generate(prompt, options)]
    assert isinstance(events[-1], Finished)
    return events[-1]
