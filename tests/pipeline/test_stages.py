"""A target whose layers are at three processes: the tokens of one process, also while its members die and hang."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bough.client import Client
from bough.config.processes import OrchestratorConfig, parse
from bough.errors import Unavailable
from bough.processes.child import RestartPolicy
from bough.processes.launch import STAGE, TARGET, Cluster, supervised
from bough.protocol.generation import Event, GenerateOptions, Speculation, StageStatus, Tokens
from orchestrator.assembly import assembled
from orchestrator.cluster.worker_handle import TargetHandle
from tests.conftest import pipeline, settings
from tests.fakes.collector import Collector, collecting
from tests.fakes.streams import PROMPT, Seen, read
from tests.fakes.waiting import until

pytestmark = pytest.mark.chaos

SAMPLED = GenerateOptions(temperature=0.8, max_tokens=60, ignore_eos=True, speculation=Speculation(budget=8))
STREAMS = [replace(SAMPLED, temperature=0.0), *(replace(SAMPLED, seed=seed) for seed in range(3))]
PATIENT = RestartPolicy(first_pause_seconds=0.1, max_in_a_row=100)  # members are ended again and again
HUNG_SECONDS = 15.0  # longer than the silence after which a link is broken

Fault = Callable[[Cluster], Awaitable[None]]


@pytest.fixture(scope="module")
async def collector() -> AsyncIterator[Collector]:
    async with collecting() as running:
        yield running


@pytest.fixture(scope="module")
async def shared(tiny: Path, collector: Collector) -> AsyncIterator[Cluster]:
    """A head and two stages, with a draft."""
    tracing = "--otlp-endpoint", collector.endpoint
    flags = "--stages", "3", "--max-nodes", "32", *tracing
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        async with pipeline(settings(tiny, tiny, *flags, drops="2", orchestrator=tracing)) as running:
            yield running


@pytest.fixture
async def whole(shared: Cluster) -> Cluster:
    """The pipeline with all its processes."""
    for name, child in shared.children.items():
        if child.has_ended():
            shared.restart(name)
    async with Client(shared.address) as client:
        await read(client, replace(SAMPLED, max_tokens=1))  # which waits until all stages are there
    return shared


@pytest.fixture
async def cluster(whole: Cluster) -> AsyncIterator[Cluster]:
    """The pipeline, whose processes are restarted as `bough up` does."""
    async with supervised(whole, lambda _: None, PATIENT):
        yield whole


@pytest.fixture(scope="module")
async def of_one_process(tiny_cluster: Cluster) -> list[list[int]]:
    """The tokens of the streams from a target that is one process, whose members cannot be lost."""
    async with Client(tiny_cluster.address) as client:
        return [(await read(client, options)).token_ids for options in STREAMS]


def killing(name: str) -> Fault:
    """A member is killed, as by the kernel for its memory."""

    async def fault(cluster: Cluster) -> None:
        process = cluster.children[name].process
        process.kill()
        await asyncio.to_thread(process.wait)

    return fault


def hanging(name: str) -> Fault:
    """A member does nothing for some time, and then continues."""

    async def fault(cluster: Cluster) -> None:
        process = cluster.children[name].process
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(HUNG_SECONDS)
        finally:
            process.send_signal(signal.SIGCONT)

    return fault


FAULTS = {
    "a killed stage": killing(f"{STAGE}1"),
    "a killed head": killing(TARGET),
    "a stage that hangs": hanging(f"{STAGE}2"),
    "a head that hangs": hanging(TARGET),
}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == "a killed stage" else pytest.mark.long) for each in FAULTS]
)
async def test_streams_have_the_tokens_of_one_process(
    cluster: Cluster, of_one_process: list[list[int]], name: str
) -> None:
    """Greedy and sampled ones, first undisturbed, and then with a fault in the middle of all of them."""
    async with Client(cluster.address) as client:
        undisturbed = [(await read(client, options)).token_ids for options in STREAMS[:2]]
        assert undisturbed == of_one_process[:2]
        has_begun = asyncio.Event()
        reading = [asyncio.create_task(read_and_tell(client, options, has_begun)) for options in STREAMS]
        await has_begun.wait()
        assert not any(task.done() for task in reading)
        await FAULTS[name](cluster)
        seen = await asyncio.gather(*reading)
    assert [each.token_ids for each in seen] == of_one_process
    assert {each.end.finish_reason for each in seen} == {"length"}


async def test_a_sweep_says_what_each_stage_did_in_it(whole: Cluster, collector: Collector) -> None:
    async with Client(whole.address) as client:
        await read(client, replace(SAMPLED, max_tokens=1, request_id="r"))

        async def are_known() -> bool:  # members report from time to time
            return all(each.memory_bytes and each.compute_ns for each in await stages_of(client))

        await until(are_known)
        stages = await stages_of(client)
    assert [each.first_layer for each in stages[1:]] == [each.end_layer for each in stages[:-1]]
    spans = await collector.trace_of("r")
    sweep = next(span for span in spans if span.name == "sweep")
    (away,) = [span for span in spans if span.name == "stages" and sweep.began_ns <= span.began_ns <= sweep.ended_ns]
    first, second = (next(span for span in spans if span.name == f"stage {number}") for number in (1, 2))
    assert [each.attributes["bough.stage.first_layer"] for each in (first, second)] == [
        each.first_layer for each in stages
    ]
    assert sweep.began_ns <= away.began_ns <= first.began_ns <= first.ended_ns
    assert first.ended_ns <= second.began_ns <= second.ended_ns <= away.ended_ns <= sweep.ended_ns


async def stages_of(client: Client) -> Sequence[StageStatus]:
    (target,) = [each.info for each in (await client.server_info()).workers if each.info.kind == "target"]
    return target.stages


async def read_and_tell(client: Client, options: GenerateOptions, has_begun: asyncio.Event) -> Seen:
    """Read a stream to its end, and set the event at its first tokens."""
    events = list[Event]()
    async for event in client.generate(PROMPT, options):
        events.append(event)
        if isinstance(event, Tokens):
            has_begun.set()
    return Seen(events)


@asynccontextmanager
async def impatient(cluster: Cluster) -> AsyncIterator[tuple[Client, TargetHandle]]:
    """A client of an orchestrator that waits for two seconds for a target, and what this one knows of the head."""
    flags = ["--index-url", cluster.index_url, "--draft", "none", "--port", "0", "--failover-timeout", "2"]
    async with AsyncExitStack() as stack:
        config = parse(OrchestratorConfig, "o", flags, {})
        assembly = await stack.enter_async_context(assembled(config, asyncio.Event()))
        client = await stack.enter_async_context(Client(f"127.0.0.1:{assembly.port}", patience_seconds=0.0))
        await until(lambda: assembly.directory.has_target)
        yield client, assembly.directory.targets[0]


async def test_a_stage_that_does_not_return_is_named_when_the_wait_is_over(whole: Cluster) -> None:
    """Nobody restarts it."""
    async with impatient(whole) as (client, _):
        has_begun = asyncio.Event()
        reading = asyncio.create_task(read_and_tell(client, SAMPLED, has_begun))
        await has_begun.wait()
        await killing(f"{STAGE}1")(whole)
        with pytest.raises(Unavailable, match=r"^stage \d .*127.0.0.1:\d+.*; no target .* could be used for 2 s$"):
            await reading


@pytest.mark.long
async def test_a_stage_that_has_been_away_is_named_with_its_layers(whole: Cluster) -> None:
    async with impatient(whole) as (client, head):
        await killing(f"{STAGE}1")(whole)

        async def is_known() -> bool:
            return any("is missing" in note for note in (await head.client.info()).notes)

        await until(is_known)
        missing = r"^stage \d \(layers \d to \d\) is missing: last seen \d+ s ago at 127.0.0.1:\d+; no target "
        with pytest.raises(Unavailable, match=missing):
            await read(client, SAMPLED)
