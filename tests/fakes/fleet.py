"""Fake targets and drafts, real orchestrators and a real index in one process: real gRPC, no torch.

The next token of a fake target is a function of the seed, the position and the last three tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import grpc

from bough import __version__
from bough.config.processes import OrchestratorConfig, parse
from bough.errors import Exhausted, NotFound, Preempted, PrefixMissing, StaleEpoch, Unavailable
from bough.pb import common_pb2, draft_pb2, target_pb2
from bough.protocol import codec
from bough.protocol.codec_fields import to_fields
from bough.protocol.generation import WorkerInfo
from bough.protocol.ids import ScopedId
from bough.protocol.messages import GrowResult, Timings, Verdict, VerifyCall, VerifyResult
from bough.protocol.prefix_hash import prefix_hash
from bough.protocol.sampling_params import PositionLogprobs, TokenLogprob
from bough.registry.records import WorkerRecord
from bough.registry.registry import SESSION_SECONDS, Registry, registered
from bough.rpc.server import serving
from bough.rpc.services import DRAFT, GENERATION, TARGET, add_service
from bough.tokenization.tokenizer import Tokenizer
from bough.tokenization.vocabulary import TokenizerFiles
from bough.trees.tree import Tree
from bough.trees.tree_plan import Growth
from orchestrator.cluster.directory import POLL_SECONDS, WEIGHTS_SECONDS, Directory
from orchestrator.service import GenerationService
from orchestrator.serving.requests import Requests
from orchestrator.serving.tenants import Callers
from target_worker.verification.verify import walk
from tests.fakes.waiting import until

VOCAB, MAX_CONTEXT, MAX_NODES = 262, 512, 32
WORDS = ("a", "b", "try ", "é", "木", "🌳")  # no two have a byte in common


class FakeText:
    """The text of fake targets: a pseudo-random sequence of words.

    A word has one to four tokens, some of which are a character only together. Words repeat, so that prompt lookup
    often guesses right.
    """

    def __init__(self, tokenizer: Tokenizer, words: Sequence[str] = WORDS) -> None:
        self._words = [tokenizer.encode(word) for word in words]
        self._after = {token: after for word in self._words for token, after in pairwise(word)}

    def next_token(self, tokens: Sequence[int], seed: int) -> int:
        """The token that follows `tokens`."""
        if tokens[-1] in self._after:
            return self._after[tokens[-1]]
        of = f"{seed} {tokens[-3:]} {len(tokens) // 50}"
        return self._words[hashlib.blake2b(of.encode(), digest_size=1).digest()[0] % len(self._words)][0]

    def output(self, prompt: Sequence[int], seed: int, num_tokens: int) -> list[int]:
        """The `num_tokens` tokens that follow `prompt`, as in plain decoding."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(self.next_token(tokens, seed))
        return tokens[len(prompt) :]


class FakeWorker:
    """What fake targets and fake drafts have in common."""

    kind = ""

    def __init__(self, worker_id: str, tokenizer: TokenizerFiles, fingerprint: str = "fake") -> None:
        self.worker_id, self.tokenizer, self.fingerprint = worker_id, tokenizer, fingerprint
        self.arithmetic, self.model_name, self.weights_hash = "", "fake", ""
        self.max_nodes = MAX_NODES
        self.text = FakeText(Tokenizer(tokenizer))
        self.held: dict[str, list[int]] = {}
        self.released: list[str] = []

    async def GetServerInfo(self, request: Any, context: Any) -> common_pb2.WorkerInfo:
        info = WorkerInfo(
            self.kind, self.worker_id, self.model_name, "a fake", self.fingerprint, self.tokenizer.fingerprint, VOCAB,
            MAX_CONTEXT, self.max_nodes, 8, bough_version=__version__, arithmetic=self.arithmetic,
            weights_hash=self.weights_hash,
        )  # fmt: skip
        return common_pb2.WorkerInfo(**to_fields(info))

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[common_pb2.TokenizerChunk]:
        for chunk in codec.tokenizer_to_wire(self.tokenizer):
            yield chunk

    def stand_on(self, context: Any) -> list[int]:
        """The tokens before the root. Raises PrefixMissing if the context continues a prefix that is not held."""
        held = self.held.get(str(context.session_id), [])
        if len(held) < context.context_start or prefix_hash(held[: context.context_start]) != context.prefix_hash:
            raise PrefixMissing("it is not held", len(held), prefix_hash(held))
        return [*held[: context.context_start], *context.tokens]


class FakeTarget(FakeWorker):
    """Servicer of bough.v1.Target. `before` and `after` are awaited around each call; they may wait or raise."""

    kind = "target"

    def __init__(self, worker_id: str, tokenizer: TokenizerFiles, fingerprint: str = "fake") -> None:
        super().__init__(worker_id, tokenizer, fingerprint)
        self.calls: list[VerifyCall] = []
        self.epochs: dict[str, int] = {}
        self.answers: dict[tuple[str, int, int], VerifyResult] = {}
        self.num_slots = 1000
        self.knows_given = True  # otherwise it is of a version that verifies chains of given tokens like any tree
        self.gave_way: set[str] = set()  # preempted sessions that wait for a slot
        self.asked_for_room: list[str] = []  # sessions that asked to reserve a slot, without sending their context
        self.before: Callable[[VerifyCall], Awaitable[None]] = _nothing
        self.after: Callable[[VerifyCall], Awaitable[None]] = _nothing

    async def Verify(self, request: target_pb2.VerifyRequest, context: Any) -> target_pb2.VerifyReply:
        call = codec.verify_call_from_wire(request, VOCAB, MAX_NODES)
        if call.worker_id != self.worker_id:
            raise Unavailable(f"worker_id: {call.worker_id} is not here")
        await self.before(call)
        result = self._verify(call)
        await self.after(call)
        return codec.verify_result_to_wire(result)

    def _verify(self, call: VerifyCall) -> VerifyResult:
        name = str(call.context.session_id)
        if call.epoch < self.epochs.get(name, 0):
            raise StaleEpoch(f"epoch: {call.epoch} is over", self.epochs[name])
        self.epochs[name] = call.epoch
        key = (name, call.epoch, call.round)
        if key in self.answers and name in self.held:
            return self.answers[key]
        self._take_slot(call)
        tokens = self.stand_on(call.context)
        self.calls.append(call)

        def draw(path: Sequence[int]) -> int:
            return self.text.next_token([*tokens, *(int(call.tree.tokens[node]) for node in path)], call.sampling.seed)

        verdict = walk(call.tree, draw)
        if call.is_given:
            verdict = (
                given(call.tree) if self.knows_given else verdict._replace(logprobs=sure(verdict.tokens_of(call.tree)))
            )
        self.held[name] = [*tokens, int(call.tree.tokens[0]), *verdict.tokens_of(call.tree)[:-1]]
        result = VerifyResult(verdict, len(self.held[name]), Timings(), call.context.context_start)
        self.answers[key] = result
        return result

    def _take_slot(self, call: VerifyCall) -> None:
        name = str(call.context.session_id)
        if call.reserves:
            self.asked_for_room.append(name)
        if name in self.held or (call.context.context_start and not call.reserves and name not in self.gave_way):
            return
        if len(self.held) >= self.num_slots:
            raise (Preempted if name in self.gave_way else Exhausted)("KV memory: all slots are in use")
        self.gave_way.discard(name)
        self.held[name] = []

    def preempt(self, session_id: str) -> None:
        """Preempt a session, and reduce the number of slots by one."""
        del self.held[session_id]
        self.gave_way.add(session_id)
        self.num_slots = len(self.held)

    async def Release(self, request: common_pb2.ReleaseRequest, context: Any) -> common_pb2.ReleaseReply:
        if request.epoch and request.epoch < self.epochs.get(request.session_id, 0):
            raise StaleEpoch("it has been placed anew")
        if self.held.pop(request.session_id, None) is None:
            raise NotFound("session_id", "it is not held")
        self.released.append(request.session_id)
        return common_pb2.ReleaseReply()


class FakeDraft(FakeWorker):
    """Servicer of bough.v1.Draft that answers with trees of one node and records what it was asked."""

    kind = "draft"

    def __init__(self, worker_id: str, tokenizer: TokenizerFiles) -> None:
        super().__init__(worker_id, tokenizer)
        self.rounds: list[int] = []
        self.growths: list[Growth] = []

    async def Grow(self, request: draft_pb2.GrowRequest, context: Any) -> draft_pb2.GrowReply:
        call = codec.grow_call_from_wire(request, VOCAB, MAX_NODES)
        held = self.held[str(call.context.session_id)] = self.stand_on(call.context)
        self.rounds.append(call.round)
        self.growths.append(call.plan.growth)
        return codec.grow_result_to_wire(GrowResult(Tree.root(call.root_token), len(held), Timings()))

    async def Release(self, request: common_pb2.ReleaseRequest, context: Any) -> common_pb2.ReleaseReply:
        self.held.pop(request.session_id, None)
        return common_pb2.ReleaseReply()


def given(tree: Tree) -> Verdict:
    """The verdict on a chain of given tokens."""
    return Verdict(tuple(range(1, len(tree))), 0, sure(tree.tokens.tolist()[1:]))


def sure(tokens: Sequence[int]) -> tuple[PositionLogprobs, ...]:
    """Log-probabilities of tokens, each of which is certain."""
    return tuple(PositionLogprobs(TokenLogprob(token, 0.0)) for token in tokens)


async def _nothing(call: VerifyCall) -> None:
    """Do nothing: the default of `before` and `after`."""


class Process:
    """A gRPC server and the resources that end with it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.address = ""

    async def serve(self, name: str, add: Callable[[grpc.aio.Server], None], port: int = 0) -> None:
        served = await self.stack.enter_async_context(
            serving("127.0.0.1", port, f"bough.v1.{name}", add, grace_seconds=0.0)
        )
        self.address = f"127.0.0.1:{served.port}"

    async def kill(self) -> None:
        """Stop the server at once: its calls end without an answer."""
        await self.stack.aclose()


@dataclass(slots=True)
class Fleet:
    """Fake workers and orchestrators that share an index."""

    registry: Registry
    tokenizer: TokenizerFiles
    stack: AsyncExitStack
    namespace: str

    async def with_own_client(self, session_seconds: float = SESSION_SECONDS) -> Fleet:
        """The same fleet with another client of the index, by which that keeps sessions for `session_seconds`."""
        registry = Registry(self.registry.safe_url, self.namespace, session_seconds)
        self.stack.push_async_callback(registry.close)
        return Fleet(registry, self.tokenizer, self.stack, self.namespace)

    async def worker(self, worker: FakeTarget | FakeDraft, port: int = 0) -> Process:
        """Serve and register a worker."""
        add = partial(add_service, TARGET if isinstance(worker, FakeTarget) else DRAFT, worker)
        process = await self._process()
        await process.serve(worker.kind.title(), add, port)
        record = WorkerRecord(worker.kind, worker.worker_id, process.address)
        await process.stack.enter_async_context(registered(self.registry, lambda: record))
        return process

    async def target(self, name: str, fingerprint: str = "fake", port: int = 0) -> tuple[FakeTarget, Process]:
        worker = FakeTarget(name, self.tokenizer, fingerprint)
        return worker, await self.worker(worker, port)

    async def target_of(self, name: str, model_name: str) -> tuple[FakeTarget, Process]:
        """Serve a target of another model, whose name is also its fingerprint."""
        worker = FakeTarget(name, self.tokenizer, model_name)
        worker.model_name = model_name
        return worker, await self.worker(worker)

    async def orchestrator(
        self,
        *flags: str,
        num_targets: int = 1,
        poll_seconds: float = POLL_SECONDS,
        weights_seconds: float = WEIGHTS_SECONDS,
    ) -> tuple[Requests, Process]:
        """Serve an orchestrator, once it knows `num_targets` targets."""
        config = parse(OrchestratorConfig, "o", ["--draft", "none", *flags], {})
        directory = Directory(self.registry)
        requests = Requests(config, directory, f"orchestrator-{id(directory)}")
        service = GenerationService(Callers(requests))
        process = await self._process()
        await process.stack.enter_async_context(directory.running(poll_seconds, weights_seconds))
        await process.stack.enter_async_context(requests.running())
        await process.serve("Generation", partial(add_service, GENERATION, service))
        await until(lambda: sum(target.is_usable for target in directory.targets) >= num_targets)
        return requests, process

    async def written(self, request_id: str) -> None:
        """Wait until the index has the finish reason of a request."""

        async def has_ended() -> bool:
            record = await self.registry.load_request(ScopedId(request_id))
            return record is not None and bool(record.finish_reason)

        await until(has_ended)

    async def _process(self) -> Process:
        return Process(await self.stack.enter_async_context(AsyncExitStack()))


@asynccontextmanager
async def fleet(index_url: str, tokenizer: TokenizerFiles, namespace: str) -> AsyncIterator[Fleet]:
    """An empty fleet; everything started in it ends with the block."""
    registry = Registry(index_url, namespace)
    await registry.wait()
    try:
        async with AsyncExitStack() as stack:
            yield Fleet(registry, tokenizer, stack, namespace)
    finally:
        await registry.close()
