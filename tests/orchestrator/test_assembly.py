"""An orchestrator inside another program: a stop event ends it, and it serves callers without gRPC."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

import pytest

from bough.client import Client
from bough.config.addresses import free_port
from bough.errors import DeadlineExceeded, InvalidRequest, Unavailable
from bough.processes.process import StoppedAtStart
from bough.protocol.generation import (
    ChatPrompt,
    Event,
    Finished,
    GenerateOptions,
    Message,
    Prompt,
    Started,
    TextPrompt,
    Tokens,
)
from orchestrator.assembly import assembled
from orchestrator.serving.tenants import Tenant
from tests.fakes.stage import LONG, PROMPT, SHORT, Orchestrator, Stage, config_of, orchestrating
from tests.fakes.waiting import until

HOST = "127.0.0.1"


async def finish(tenant: Tenant, prompt: Prompt = PROMPT, options: GenerateOptions = SHORT) -> list[Event]:
    return [event async for event in tenant.generate(prompt, options)]


async def read(client: Client) -> list[Event]:
    return [event async for event in client.generate(PROMPT, SHORT)]


async def kinds(stage: Stage) -> set[str]:
    return {record.kind for record in await stage.registry.workers()}


async def is_announced(stage: Stage) -> bool:
    return "orchestrator" in await kinds(stage)


# A stop event ends it


async def test_it_serves_until_the_stop_event_without_signal_handlers(stage: Stage) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    stop = asyncio.Event()
    async with assembled(config_of(stage), stop) as orchestrator:
        await until(lambda: orchestrator.is_ready)
        assert "orchestrator" not in await kinds(stage)  # it listens, and is not announced yet
        serving = asyncio.create_task(orchestrator.serve(stop))
        await until(lambda: is_announced(stage))
        events = await finish(orchestrator.callers.tenant(()))
        assert [type(event) for event in events] == [Started, Tokens, Tokens, Tokens, Finished]
        async with Client(f"127.0.0.1:{orchestrator.port}", patience_seconds=0.0) as client:
            assert isinstance([event async for event in client.generate(PROMPT, SHORT)][-1], Finished)
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
        stop.set()
        await serving
        assert not orchestrator.is_ready
        assert "orchestrator" not in await kinds(stage)
        with pytest.raises(Unavailable, match="draining; ask another orchestrator"):
            await finish(orchestrator.callers.tenant(()))


async def test_an_orchestrator_stopped_before_the_index_answers_does_not_start(stage: Stage) -> None:
    stop = asyncio.Event()
    nowhere = replace(config_of(stage), index_url="redis://127.0.0.1:1")
    entering = asyncio.create_task(assembled(nowhere, stop).__aenter__())
    await asyncio.sleep(0.3)
    assert not entering.done()
    stop.set()
    with pytest.raises(StoppedAtStart):
        await entering


# Draining


async def test_a_successor_can_use_the_ports_during_a_drain(stage: Stage) -> None:
    """New requests were refused while a stream lasted: a redeploy may take as long as the longest of them."""
    ports = [free_port(HOST) for _ in range(3)]
    names = ("--port", "--http-port", "--metrics-port")
    flags = [str(part) for pair in zip(names, ports, strict=True) for part in pair]
    stage.target.may_answer.clear()
    stop = asyncio.Event()
    async with assembled(config_of(stage, *flags), stop) as orchestrator, Client(f"{HOST}:{ports[0]}") as client:
        await until(lambda: orchestrator.is_ready)
        serving = asyncio.create_task(orchestrator.serve(stop))
        running = asyncio.create_task(read(client))
        await until(lambda: stage.target.asked)
        stop.set()
        await until(lambda: all(free_port(HOST, port) == port for port in ports))
        async with assembled(config_of(stage, *flags), asyncio.Event()) as successor:
            await until(lambda: successor.is_ready)
            stage.target.may_answer.set()
            async with Client(f"{HOST}:{ports[0]}") as another:
                for seen in (await read(another), await running):
                    assert isinstance(seen[-1], Finished)
                    assert not any("resumed" in warning for warning in seen[-1].warnings)
            await serving
            for one in (orchestrator, successor):
                await until(lambda one=one: one.requests.loads().num_requests_total == 1)


@pytest.mark.parametrize("is_reading", [True, False])
async def test_unfinished_requests_are_freed_whether_they_are_read_or_not(stage: Stage, is_reading: bool) -> None:
    stop = asyncio.Event()
    async with assembled(config_of(stage, "--drain-seconds", "0.3"), stop) as orchestrator:
        await until(lambda: orchestrator.is_ready)
        serving = asyncio.create_task(orchestrator.serve(stop))
        events = orchestrator.callers.tenant(()).generate(PROMPT, LONG)
        for _ in range(3):
            await anext(events)
        stage.target.may_answer.clear()
        reading = asyncio.ensure_future(anext(events)) if is_reading else None
        stop.set()
        await serving
        assert orchestrator.requests.loads().num_requests_running == 0
        await until(lambda: stage.target.released == stage.target.asked[:1])
        with pytest.raises(Unavailable, match=r"draining.*; this call was cut off, and can be resumed"):
            await (reading or anext(events))
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_the_end_of_the_block_frees_everything_without_a_drain(stage: Stage) -> None:
    async with assembled(config_of(stage), asyncio.Event()) as orchestrator:
        await until(lambda: orchestrator.is_ready)
        events = orchestrator.callers.tenant(()).generate(PROMPT, LONG)
        await anext(events)
    assert orchestrator.requests.loads().num_requests_running == 0
    with pytest.raises(Unavailable, match="has ended"):
        await anext(events)


# Readers that stop reading


@pytest.mark.parametrize("session_id", ["", "kept"])
async def test_a_caller_that_stops_reading_occupies_nothing(stage: Stage, session_id: str) -> None:
    async with orchestrating(stage, "--stalled-timeout", "0.3") as orchestrator:
        events = orchestrator.callers.tenant(()).generate(PROMPT, replace(LONG, session_id=session_id))
        for _ in range(3):
            await anext(events)
        await until(lambda: not orchestrator.requests.loads().num_requests_running)
        if session_id:  # its session can be continued, though the generator still exists
            assert isinstance(
                (await finish(orchestrator.callers.tenant(()), options=replace(SHORT, session_id="kept")))[-1], Finished
            )
            assert not stage.target.released
        else:
            await until(lambda: stage.target.released)
        with pytest.raises(DeadlineExceeded, match=r"has not been read for 0\.3 s; it is ended, and can be resumed"):
            await anext(events)


@pytest.mark.slow
async def test_a_caller_that_reads_in_time_is_not_ended(stage: Stage) -> None:
    async with orchestrating(stage, "--stalled-timeout", "2") as orchestrator:
        num_events = 0
        async for _ in orchestrator.callers.tenant(()).generate(PROMPT, replace(SHORT, max_tokens=40)):
            num_events += 1
            await asyncio.sleep(0.06)  # 2.5 s in all
        assert num_events == 42


# Texts


@pytest.mark.parametrize(
    ("prompt", "changes", "name"),
    [
        (TextPrompt("a\ud800"), {}, "text"),
        (ChatPrompt((Message("us\udcffer", "x"),)), {}, r"chat\.messages\[0\]\.role"),
        (ChatPrompt((Message("user", "x"), Message("user", "\udfff"))), {}, r"chat\.messages\[1\]\.content"),
        (PROMPT, {"stop": ("x", "\ud800")}, r"stop\[1\]"),
        (PROMPT, {"session_id": "\ud800"}, "session_id"),
        (PROMPT, {"request_id": "\ud800"}, "request_id"),
        (PROMPT, {"model": "\ud800"}, "model"),
    ],
)
async def test_half_a_surrogate_pair_is_refused_with_its_fields_name(
    orchestrator: Orchestrator, prompt: Prompt, changes: dict[str, object], name: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}: must be UTF-8"):
        await finish(orchestrator.callers.tenant(()), prompt, replace(SHORT, **changes))


@pytest.mark.parametrize(("name", "why"), [("\ud800", "must be UTF-8"), ("s" * 257, "at most 256 characters, got 257")])
async def test_an_invalid_session_name_is_refused_and_does_not_count_as_a_fault_of_the_index(
    orchestrator: Orchestrator, name: str, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^session_id: .*{why}"):
        await orchestrator.callers.tenant(()).close_session(name)
