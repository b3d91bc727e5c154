"""A process that drains finishes what runs and refuses what is new; connections that end by age lose no call."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bough.client import Client
from bough.errors import BoughError, NoAnswer, Unavailable
from bough.pb import generation_pb2
from bough.processes.worker_process import drain_worker
from bough.protocol import codec_generation as wire
from bough.protocol.generation import Finished, GenerateOptions, Speculation, Started, TextPrompt, Tokens
from bough.rpc.drain import BETWEEN_CALLS_SECONDS, Drainer, SessionGate
from bough.rpc.server import open_channel, serving
from bough.rpc.services import GENERATION, stub_of
from orchestrator.assembly import assembled
from orchestrator.service import GenerationService
from tests.conftest import pipeline, settings
from tests.fakes.stage import TOKEN, FakeTarget, Stage, config_of, orchestrating, staged
from tests.fakes.waiting import until

PROMPT = TextPrompt("hello")
SHORT = GenerateOptions(max_tokens=3, temperature=0.0, ignore_eos=True)


@dataclass
class Program:
    """An orchestrator in a process of its own."""

    process: subprocess.Popen[bytes]
    client: Client

    async def ended(self) -> int:
        """Its exit status, once it has one."""
        await until(lambda: self.process.poll() is not None)
        return self.process.returncode


@asynccontextmanager
async def program(stage: Stage, *flags: str) -> AsyncIterator[Program]:
    """Started, and at its end ended."""
    index = ["--index-url", stage.index_url, "--namespace", stage.namespace]
    command = [sys.executable, "-m", "orchestrator", "--port", "0", "--draft", "none", *index]
    process = subprocess.Popen([*command, *flags])
    try:
        async with Client(await address_of(stage, "orchestrator"), patience_seconds=0.0) as client:
            await wait_for_target(client)
            yield Program(process, client)
    finally:
        process.kill()
        process.wait()


async def address_of(stage: Stage, kind: str) -> str:
    async def addresses() -> list[str]:
        return [record.address for record in await stage.registry.workers() if record.kind == kind]

    await until(addresses)
    return (await addresses())[0]


async def wait_for_target(client: Client) -> None:
    async def is_there() -> bool:
        try:
            await client.model_info()
        except BoughError:
            return False
        return True

    await until(is_there)


async def finish(client: Client, options: GenerateOptions = SHORT) -> Finished:
    events = [event async for event in client.generate(PROMPT, options)]
    assert isinstance(events[-1], Finished)
    return events[-1]


async def begun(stage: Stage, client: Client, options: GenerateOptions = SHORT) -> asyncio.Task[Finished]:
    """A request that the target is busy with."""
    asked = len(stage.target.asked)
    task = asyncio.create_task(finish(client, options))
    await until(lambda: len(stage.target.asked) > asked)
    return task


async def is_gone(client: Client) -> bool:
    """Whether its port does not answer."""
    try:
        await client.loads()
    except NoAnswer:
        return True
    return False


async def test_accepted_requests_finish_and_new_ones_are_refused(stage: Stage) -> None:
    stage.target.may_answer.clear()
    stop = asyncio.Event()
    async with (
        assembled(config_of(stage, "--max-running", "1"), stop) as orchestrator,
        Client(f"127.0.0.1:{orchestrator.port}", patience_seconds=0.0) as client,
    ):
        await until(lambda: orchestrator.is_ready)
        serving = asyncio.create_task(orchestrator.serve(stop))
        running = await begun(stage, client)
        waiting = asyncio.create_task(finish(client))
        await until(lambda: orchestrator.requests.loads().num_requests_waiting)
        stop.set()
        await until(lambda: is_gone(client))
        with pytest.raises(NoAnswer):
            await finish(client)
        while {record.kind for record in await stage.registry.workers()} != {"target"}:
            await asyncio.sleep(0.02)
        assert not serving.done()
        stage.target.may_answer.set()
        for each in (running, waiting):  # to who waits for a turn over HTTP a refusal would be a failed request
            assert (await each).usage.completion_tokens == 3
        await serving


@pytest.mark.pipeline
async def test_a_second_signal_ends_a_drain_at_once(stage: Stage) -> None:
    stage.target.may_answer.clear()
    async with program(stage, "--drain-seconds", "600") as orchestrator:
        running = await begun(stage, orchestrator.client)
        orchestrator.process.send_signal(signal.SIGTERM)
        await until(lambda: is_gone(orchestrator.client))
        orchestrator.process.send_signal(signal.SIGTERM)
        assert await orchestrator.ended() == 128 + signal.SIGTERM
        with pytest.raises(Unavailable):
            await running


async def is_refused_in_the_end(client: Client) -> bool:
    """Whether new requests come to be Unavailable: once the signal has arrived."""
    for _ in range(100):
        try:
            await finish(client)
        except Unavailable:
            return True
    return False


@pytest.mark.pipeline
async def test_workers_let_sessions_finish_and_accept_no_new_ones(tiny: Path) -> None:
    """Both are real: a stream that runs at the signal goes on to its end, with the tokens of an undisturbed run.

    The target takes what memory is free, and so has started when the draft had what it needs: both once took their
    measure at once, and a GPU had no room for the draft any more.
    """
    impatient = ("--failover-timeout", "0.1")
    config = settings(tiny, tiny, "--max-nodes", "8", "--resident-layers", "-1", drops="2", orchestrator=impatient)
    options = replace(SHORT, max_tokens=150, speculation=Speculation(budget=4))
    async with pipeline(config) as cluster, Client(cluster.address, patience_seconds=0.0) as client:
        undisturbed = [e.token_ids async for e in client.generate(PROMPT, options) if isinstance(e, Tokens)]
        stream = client.generate(PROMPT, options)
        await anext(stream)
        tokens = [(await anext(stream)).token_ids]
        assert [name for name in cluster.children if "worker" in name] == ["draft_worker", "target_worker"]
        workers = [cluster.children[name].process for name in ("target_worker", "draft_worker")]
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        assert await is_refused_in_the_end(client)
        tokens += [event.token_ids async for event in stream if isinstance(event, Tokens)]
        assert [t for ids in tokens for t in ids] == [t for ids in undisturbed for t in ids]
        await until(lambda: all(worker.poll() is not None for worker in workers))
        assert [worker.returncode for worker in workers] == [0, 0]


class Leaver:
    """A worker that has something to hand over."""

    def __init__(self) -> None:
        self.left: Future[None] = Future()
        self.num_asked = 0

    def drain(self) -> Future[None]:
        self.num_asked += 1
        return self.left


@pytest.mark.parametrize("is_done", [True, False])
async def test_a_worker_with_something_to_hand_over_is_asked_to(is_done: bool) -> None:
    """And waited for, but not forever: its remaining work continues until the process closes it."""
    worker = Leaver()
    if is_done:
        worker.left.set_result(None)
    began = time.monotonic()
    async with serving("127.0.0.1", 0, "bough.v1.Target", lambda _: None, grace_seconds=0.0) as served:
        await drain_worker(served, worker, "target", 0.3)
    assert worker.num_asked == 1
    assert worker.left.done() == is_done
    assert is_done or time.monotonic() - began >= 0.3


# The gate by itself


def verify(session_id: str) -> SimpleNamespace:
    return SimpleNamespace(context=SimpleNamespace(session_id=session_id))


class Clock:
    """A clock that only the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def track(gate: Drainer, method: str, request: object = None) -> Iterator[None]:
    with gate.track(method, request):
        yield


async def test_a_closed_gate_refuses_work_and_nothing_else() -> None:
    gate = Drainer("Generate")
    with track(gate, "Generate"):
        gate.stop_accepting("draining")
        assert gate.is_busy
        with pytest.raises(Unavailable, match="draining"):
            gate.track("Generate", None).__enter__()
        with track(gate, "GetLoads"):
            assert not await gate.wait_idle(0.0)
    assert await gate.wait_idle(0.0)


async def test_a_session_with_a_running_request_is_let_through() -> None:
    clock = Clock()
    gate = SessionGate("Verify", clock=clock)
    for session_id in ("a", "b"):
        with track(gate, "Verify", verify(session_id)):
            pass
    gate.stop_accepting("draining")
    with pytest.raises(Unavailable, match="draining"):
        gate.track("Verify", verify("new")).__enter__()
    clock.now += BETWEEN_CALLS_SECONDS - 1.0
    with track(gate, "Verify", verify("a")):
        pass
    clock.now += 2.0  # b has not called for so long that it is not in the middle of anything
    with pytest.raises(Unavailable, match="draining"):
        gate.track("Verify", verify("b")).__enter__()
    assert gate.is_busy
    with track(gate, "Release", SimpleNamespace(session_id="a")):
        pass
    assert not gate.is_busy


async def test_interrupted_calls_are_unavailable_and_abandoned_ones_cancelled() -> None:
    gate = Drainer("Generate")
    freed: list[str] = []

    async def call(name: str) -> None:
        with gate.track("Generate", None):
            try:
                await asyncio.sleep(60.0)
            finally:
                await asyncio.sleep(0.05)  # freeing takes a moment, and is waited for
                freed.append(name)

    left, cut = asyncio.create_task(call("left")), asyncio.create_task(call("cut"))
    await asyncio.sleep(0)
    left.cancel()
    gate.stop_accepting("draining")
    await asyncio.wait({left})
    await gate.cut()
    assert freed == ["left", "cut"]
    assert left.cancelled()
    with pytest.raises(Unavailable, match="draining; this call was cut off"):
        await cut
    assert cut.cancelling() == 0


NUM_TOKENS = 60


@pytest.mark.slow
async def test_a_stream_outlives_its_connections_maximum_age_and_new_calls_use_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's connection to the orchestrator, and the orchestrator's to the target, which is called each round."""
    peers, target_peers = [], []
    get_loads, verify = GenerationService.GetLoads, FakeTarget.Verify

    async def noted(self: GenerationService, request: Any, context: Any) -> generation_pb2.Loads:
        peers.append(context.peer())
        return await get_loads(self, request, context)

    async def noted_verify(self: FakeTarget, request: Any, context: Any) -> Any:
        target_peers.append(context.peer())
        return await verify(self, request, context)

    monkeypatch.setattr(GenerationService, "GetLoads", noted)
    monkeypatch.setattr(FakeTarget, "Verify", noted_verify)
    options = GenerateOptions(max_tokens=NUM_TOKENS, temperature=0.0)
    async with (
        staged(tmp_path, max_connection_age=0.5) as stage,
        orchestrating(stage, "--max-connection-age", "0.5") as orchestrator,
        open_channel(orchestrator.address) as channel,
    ):
        stage.target.sweep_seconds = 0.05
        stub = stub_of(GENERATION, channel)
        call = stub.Generate(wire.request_to_wire(TextPrompt("hello"), options))
        events = []
        async for message in call:
            events.append(wire.event_from_wire(message))
            await stub.GetLoads(generation_pb2.GetLoadsRequest())
        assert isinstance(events[0], Started)
        tokens = [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
        assert tokens == [TOKEN] * NUM_TOKENS
        end = events[-1]
        assert isinstance(end, Finished)
        assert (end.num_failovers, end.warnings) == (0, ())
        assert call.done()
    assert len(set(peers)) > 1, "the channel has connected anew while the stream went on"
    assert len(set(target_peers)) > 1
