"""However requests end, their workers keep nothing of sessions that are not kept, and epochs keep growing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bough.client import Client
from bough.errors import InvalidRequest, PrefixMissing, StaleEpoch, Unavailable
from bough.pb import common_pb2, target_pb2
from bough.protocol.generation import Resume, Tokens
from bough.protocol.ids import ScopedId
from bough.protocol.messages import VerifyCall
from bough.registry.records import Claim
from orchestrator.admission.active_streams import Stream
from orchestrator.cluster.directory import Directory
from orchestrator.cluster.target_place import TargetPlace
from orchestrator.cluster.worker_clients import TargetClient
from orchestrator.opening.epochs import Epochs
from orchestrator.rounds.round import Rounds
from orchestrator.sessions.session import Session
from tests.fakes.fleet import FakeTarget, Fleet
from tests.fakes.streams import OPTIONS, PROMPT, expected, read
from tests.fakes.waiting import PATIENCE_SECONDS, until

RESUMED = replace(OPTIONS, resume=Resume(0, ()))


async def for_ever(call: VerifyCall) -> None:
    """The answer does not arrive."""
    await asyncio.Event().wait()


@pytest.mark.parametrize("flags", [(), ("--target-timeout", "2")], ids=["the request ends", "no answer in time"])
async def test_a_slot_reserved_at_a_target_that_does_not_answer_is_released(
    fakes: Fleet, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """Otherwise a slot whose reservation was not answered stays in use for --lease-seconds while others wait."""
    verify, asked = FakeTarget.Verify, []

    async def silent(self: FakeTarget, request: target_pb2.VerifyRequest, context: Any) -> target_pb2.VerifyReply:
        asked.append(self.worker_id)
        try:
            return await verify(self, request, context)
        except PrefixMissing:
            await asyncio.Event().wait()
            raise

    monkeypatch.setattr(FakeTarget, "Verify", silent)
    targets = [(await fakes.target(f"t{index}"))[0] for index in range(2)]
    for target in targets:
        target.num_slots = 0
    _, process = await fakes.orchestrator(*flags, num_targets=2)
    async with Client(process.address) as client:
        reading = asyncio.create_task(read(client))
        await until(lambda: len(asked) > 1)
        (other,) = (target for target in targets if target.worker_id != asked[0])
        other.num_slots = 1
        await until(lambda: other.held)
        if not flags:
            reading.cancel()
        await until(lambda: other.released)
        reading.cancel()
        await asyncio.wait({reading})


async def test_an_abandoned_target_that_does_not_answer_keeps_no_slot(fakes: Fleet) -> None:
    """It was there all the while, and kept one for --lease-seconds for a session that had gone on elsewhere."""
    targets = [(await fakes.target(f"t{index}"))[0] for index in range(2)]
    _, process = await fakes.orchestrator("--target-timeout", "2", num_targets=2)
    stuck: list[str] = []

    async def answer_no_more(call: VerifyCall) -> None:
        if call.round == 3 and not stuck:
            stuck.append(call.worker_id)
        if call.worker_id in stuck:
            await for_ever(call)

    for target in targets:
        target.before = answer_no_more
    async with Client(process.address) as client:
        seen = await read(client)
    assert seen.token_ids == expected(fakes)
    assert seen.end.num_failovers == 1
    (left,) = (target for target in targets if target.worker_id in stuck)
    await until(lambda: left.released)


@pytest.mark.parametrize("is_recorded", [True, False], ids=["after a round", "in its first round"])
async def test_slots_of_a_resumed_stream_are_released_if_it_is_not_continued(fakes: Fleet, is_recorded: bool) -> None:
    """The call that resumes it is refused; or it knows of no session, as no round is recorded yet, and begins one."""
    target, _ = await fakes.target("t")
    requests, process = await fakes.orchestrator()
    async with Client(process.address, patience_seconds=0.0) as client:
        if is_recorded:
            target.after = _from_round(3)
        else:
            target.after = for_ever
        running = asyncio.create_task(read(client))
        await until(lambda: len(target.calls) == (4 if is_recorded else 1))
        if is_recorded:
            await until(lambda: fakes.registry.load_request(ScopedId("r")))
            with pytest.raises(InvalidRequest, match="must have the same sampling parameters"):
                await read(client, replace(RESUMED, seed=6))
        else:
            target.after = _at_once
            assert (await read(client, RESUMED)).token_ids == expected(fakes)
        with pytest.raises(StaleEpoch, match="has been resumed by another call"):
            await running
    (session, *_) = {call.context.session_id: None for call in target.calls}
    await until(lambda: not target.held)

    async def is_forgotten() -> bool:
        return await fakes.registry.load_session(session) is None

    await until(is_forgotten)
    assert [known.num_running for known in requests.directory.targets] == [0]


async def _at_once(call: VerifyCall) -> None:
    """No fault."""


def _from_round(number: int) -> Any:
    async def hook(call: VerifyCall) -> None:
        if call.round >= number:
            await for_ever(call)

    return hook


async def test_a_session_closed_in_its_first_round_is_released(fakes: Fleet) -> None:
    """The index has no record yet of where it runs."""
    target, _ = await fakes.target("t")
    _, process = await fakes.orchestrator()
    target.after = for_ever
    async with Client(process.address, patience_seconds=0.0) as client:
        running = asyncio.create_task(read(client, replace(OPTIONS, session_id="s")))
        await until(lambda: target.held)
        await client.close_session("s")
        with pytest.raises(StaleEpoch, match="'s' was closed"):
            await running
    await until(lambda: not target.held)


async def test_a_cancellation_at_the_end_of_a_stream_skips_no_release(
    fakes: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = await fakes.target("t")
    requests, _ = await fakes.orchestrator()
    is_ending = asyncio.Event()

    async def slow_to_end(self: Rounds, *_: Any) -> Tokens:
        try:
            await asyncio.sleep(60)
        finally:
            is_ending.set()
            await asyncio.sleep(60)
        raise AssertionError("it is cancelled")

    events = requests.generate(PROMPT, OPTIONS)
    while not isinstance(await anext(events), Tokens):
        pass
    monkeypatch.setattr(Rounds, "run", slow_to_end)
    ending = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0.05)
    ending.cancel()
    await is_ending.wait()
    assert not ending.done()
    ending.cancel()
    await asyncio.wait({ending})
    await until(lambda: not target.held)
    assert [known.num_running for known in requests.directory.targets] == [0]


def test_an_earlier_stream_learns_which_call_continues_its_session() -> None:
    """In either order of its end and the news, also through a call that was superseded before it ran."""
    first, second = Stream(ScopedId("r"), ScopedId()), Stream(ScopedId("r"), ScopedId())
    told: list[ScopedId] = []
    second.end(StaleEpoch("resumed by a third"))
    second.takes_over(first, ScopedId())
    first.leave(told.append)
    assert told == []
    second.succeeded_by(ScopedId("session"))
    assert told == [ScopedId("session")]
    later: list[ScopedId] = []
    first.leave(later.append)
    assert later == [ScopedId("session")]


def deaf(monkeypatch: pytest.MonkeyPatch, num_calls: int) -> list[str]:
    """Make fake targets fail their first calls to release; returns the sessions of all such calls."""
    release, asked = FakeTarget.Release, list[str]()

    async def late(self: FakeTarget, request: common_pb2.ReleaseRequest, context: Any) -> common_pb2.ReleaseReply:
        asked.append(request.session_id)
        if len(asked) <= num_calls:
            raise Unavailable("it does not answer")
        return await release(self, request, context)

    monkeypatch.setattr(FakeTarget, "Release", late)
    return asked


async def test_an_unanswered_release_is_repeated(fakes: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot stayed in use for --lease-seconds where the one attempt met a target that did not answer just then."""
    asked = deaf(monkeypatch, 3)
    target, _ = await fakes.target("t")
    requests, process = await fakes.orchestrator()
    requests.endings.retry_pauses = 3 * (0.01,)
    async with Client(process.address) as client:
        await read(client)
    await until(lambda: target.released)
    assert not target.held
    assert asked == 4 * target.released
    await until(lambda: requests.endings.is_idle)


async def test_repeating_a_release_delays_no_request(fakes: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the session's next request nor an orchestrator that ends."""
    asked = deaf(monkeypatch, 1000)
    await fakes.target("t")
    requests, process = await fakes.orchestrator()
    requests.endings.retry_pauses = (3600.0,)
    async with Client(process.address) as client:
        await read(client)
    await until(lambda: asked)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await requests.endings.done(asked[0])
        await process.kill()
    assert len(asked) == 1
    assert requests.endings.is_idle


@pytest.mark.parametrize(
    ("is_known", "is_elsewhere", "num_asked"),
    [(True, False, 1), (False, False, 1), (True, True, 2)],
    ids=["it runs there again", "the target was forgotten", "it runs elsewhere by now"],
)
async def test_a_release_is_only_repeated_if_it_frees_a_slot(
    fakes: Fleet, monkeypatch: pytest.MonkeyPatch, is_known: bool, is_elsewhere: bool, num_asked: int
) -> None:
    """A session may come back, in the same epoch, to a target that it has left: its slot is in use then."""
    asked = deaf(monkeypatch, 1000)
    await fakes.target("t")
    requests, _ = await fakes.orchestrator()
    requests.endings.retry_pauses = (0.01,)
    (target,) = requests.directory.targets
    left = target if is_known else replace(target)
    session = cast(Session, SimpleNamespace(session_id=ScopedId("s"), epoch=1))
    requests.endings.let_go(session, left, TargetPlace(replace(target) if is_elsewhere else target))
    await until(lambda: asked and requests.endings.is_idle)
    assert asked == ["s"] * num_asked


@pytest.mark.parametrize("num_ticks", range(6))
async def test_a_cancellation_during_an_abort_is_not_swallowed(num_ticks: int) -> None:
    """A stop button sends Abort and closes the connection: the handler must end, or it waits for a reader forever."""
    stream = Stream(ScopedId("r"), ScopedId())

    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            for _ in range(3):
                await asyncio.sleep(0)

    async def handler() -> None:
        await stream.before_end(slow_to_end())
        await asyncio.sleep(60)  # what a handler does next, for a reader that has gone

    task = asyncio.create_task(handler())
    await asyncio.sleep(0)
    stream.end()
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(5):
        await asyncio.wait({task})
    assert task.cancelled()


async def test_a_closed_channel_counts_as_a_worker_that_does_not_answer() -> None:
    """A request may wait for a target that is forgotten meanwhile: it must go to another, not end as a bug of ours."""
    client = TargetClient("127.0.0.1:9", "t")
    await client.close()
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9: the connection was closed"):
        await client.info()


AHEAD = 2**52  # of this machine's clock, in microseconds, as an index's may be


@dataclass
class FakeDirectory:
    """It and its index in one."""

    index_problem: str = ""
    registry: Any = field(init=False)

    def __post_init__(self) -> None:
        self.registry = self

    async def claim_session(self, session_id: str, holder_id: str, epoch: int | None, past: int) -> Claim:
        return Claim(AHEAD, None)


async def test_epochs_keep_growing_without_the_index() -> None:
    """By a clock that is behind the index's; a target would refuse the session's next turn."""
    directory = FakeDirectory()
    claims = Epochs(cast(Directory, directory), "me")
    epochs = [(await claims.begin("s")).epoch]
    directory.index_problem = "it is gone"
    epochs += [(await claims.begin("s")).epoch, (await claims.begin("s")).epoch]
    assert epochs == [AHEAD, AHEAD + 1, AHEAD + 2]
