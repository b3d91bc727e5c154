"""Targets that fail in the middle of a stream: another takes over, and nothing is lost or comes twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from unittest.mock import AsyncMock, Mock

import pytest

from bough.client import Client
from bough.errors import BoughError, NoAnswer, StaleEpoch, Unavailable
from bough.protocol.generation import TextPrompt
from bough.protocol.ids import ScopedId
from bough.protocol.messages import VerifyCall
from bough.registry.records import WorkerRecord
from orchestrator.cluster.directory import POLL_SECONDS
from orchestrator.cluster.target_place import TargetPlace
from orchestrator.rounds.verifier import MOST_IN_ALL, MOST_TARGETS, Verifier, _Trouble
from tests.fakes.fleet import Fleet, Process
from tests.fakes.streams import OPTIONS, Gate, expected, failing, kill_the_one_that_gets, once, read
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow  # running services are called


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [Unavailable("gone for a moment"), ValueError("a bug")])
async def test_a_temporary_fault_changes_nothing(fakes: Fleet, when: str, error: Exception) -> None:
    """Whether the verdict had been reached when the answer was lost or not: the same call is made again."""
    target, _ = await fakes.target("t1")
    _, process = await fakes.orchestrator()
    setattr(target, when, once(failing(error), 3))
    async with Client(process.address) as client:
        seen = await read(client)
    assert seen.token_ids == expected(fakes)
    assert (seen.end.num_failovers, seen.end.warnings) == (0, ())
    assert len({(call.epoch, call.round) for call in target.calls}) == len(target.calls)


@pytest.mark.parametrize("call_number", [1, 2, 5])
async def test_another_target_takes_over(fakes: Fleet, call_number: int) -> None:
    targets = [await fakes.target("t1"), await fakes.target("t2")]
    _, process = await fakes.orchestrator(num_targets=2)
    kill_the_one_that_gets(call_number, targets)
    async with Client(process.address) as client:
        seen = await asyncio.wait_for(read(client), 30)
    assert seen.token_ids == expected(fakes)
    assert seen.end.num_failovers == 1
    assert "has taken over" in seen.end.warnings[0]
    epochs = {call.epoch for target, _ in targets for call in target.calls}
    assert len(epochs) == (1 if call_number == 1 else 2)


@pytest.mark.parametrize("name", ["fingerprint", "arithmetic"])
async def test_a_target_with_another_model_does_not_take_over(fakes: Fleet, name: str) -> None:
    """It would continue with another text, or with one that is rounded otherwise; for a client that resumes too."""
    targets = [await fakes.target("t1"), await fakes.target("t2")]
    setattr(targets[1][0], name, "other")
    _, process = await fakes.orchestrator("--failover-timeout", "0.5", num_targets=2)
    kill_the_one_that_gets(3, targets)
    async with Client(process.address, patience_seconds=0.5) as client:
        with pytest.raises(Unavailable, match="no target with this model could be used"):
            await asyncio.wait_for(read(client), 30)
    assert not targets[0][0].calls or not targets[1][0].calls


@pytest.mark.parametrize(("fingerprint", "most_seconds"), [("fake", "4"), ("other", "1")])
async def test_another_process_at_the_same_address_is_another_target(
    fakes: Fleet, fingerprint: str, most_seconds: str
) -> None:
    """A channel connects to any server at its address; with another model the text would change in the middle."""
    target, server = await fakes.target("t1")
    _, process = await fakes.orchestrator("--failover-timeout", most_seconds, poll_seconds=0.05)
    options = replace(OPTIONS, session_id="s", request_id="")
    async with Client(process.address, patience_seconds=0.1) as client:
        target.before = once(partial(asyncio.sleep, 60), 4)
        running = asyncio.create_task(read(client, options))
        await until(lambda: len(target.calls) == 3)
        port = int(server.address.split(":")[1])
        await server.kill()
        second, _ = await fakes.target("t2", fingerprint, port)
        if fingerprint == "fake":
            seen = await asyncio.wait_for(running, 30)
            assert (seen.token_ids, seen.end.num_failovers) == (expected(fakes), 1)
        else:
            with pytest.raises(Unavailable, match="no target"):
                await asyncio.wait_for(running, 30)
            assert second.calls == []


@pytest.mark.parametrize("knows_the_dead", [True, False])
async def test_a_target_at_a_dead_ones_address_is_used(fakes: Fleet, knows_the_dead: bool) -> None:
    """For seconds both are listed, and for good each was taken to have lost its address to the other."""
    _, server = await fakes.target("t1")
    if knows_the_dead:
        requests, process = await fakes.orchestrator()
    await server.kill()
    await fakes.registry.register(WorkerRecord("target", "t1", server.address), lease_seconds=1.5)  # it was killed
    await fakes.target("t2", port=int(server.address.split(":")[1]))
    if not knows_the_dead:
        requests, process = await fakes.orchestrator()
    await until(lambda: requests.directory.find("t2") is not None)
    await asyncio.sleep(2 * POLL_SECONDS)
    async with Client(process.address, patience_seconds=0.1) as client:
        assert (await read(client)).token_ids == expected(fakes)
    (status,) = [status for status in requests.directory.statuses() if status.info.worker_id == "t2"]
    assert status.problem == ""


async def test_a_superseded_stream_ends_with_an_error_and_frees_nothing(fakes: Fleet) -> None:
    """Two orchestrators on one session: the newer epoch has it; the older stream gets an error and frees nothing."""
    target, _ = await fakes.target("t1")
    (requests, first), (_, second) = await fakes.orchestrator(), await fakes.orchestrator()
    options = replace(OPTIONS, session_id="s", request_id="")
    gate = Gate(target, 4)
    async with Client(first.address) as old, Client(second.address) as new:
        running = asyncio.create_task(read(old, options))
        await gate.reached()
        seen = await read(new, options)
        gate.open()
        with pytest.raises(StaleEpoch, match="is over"):
            await running
        await until(lambda: requests.endings.is_idle)
    assert seen.token_ids == expected(fakes)
    assert target.held["s"]


async def test_a_target_learns_how_many_sessions_run_there(fakes: Fleet) -> None:
    """So that it need not wait for those that have ended."""
    target, _ = await fakes.target("t1")
    _, process = await fakes.orchestrator()
    both, begun = asyncio.Barrier(2), set[str]()

    async def meet(call: VerifyCall) -> None:
        """The first calls of two sessions wait for each other."""
        if len(begun) < 2 and call.context.session_id not in begun:
            begun.add(call.context.session_id)
            await both.wait()

    target.before = meet
    options = replace(OPTIONS, request_id="")
    async with Client(process.address) as client:
        await asyncio.wait_for(asyncio.gather(*(read(client, options) for _ in range(2))), 30)
        num_before = len(target.calls)
        await asyncio.wait_for(read(client, options), 30)
    (caller,) = {call.caller for call in target.calls}
    assert caller
    assert max(call.num_running for call in target.calls[:num_before]) == 2
    assert {call.num_running for call in target.calls[num_before:]} == {1}, "the others have ended"


BAD = TextPrompt("bad")
BAD_OPTIONS = replace(OPTIONS, request_id="bad", session_id="bad")


async def fail_the_bad(call: VerifyCall) -> None:
    """What a bug does to one request."""
    if call.context.session_id.name == "bad":
        raise ValueError("a bug")


async def test_a_request_that_always_fails_takes_no_target_from_others(fakes: Fleet) -> None:
    """183 of 193 others were refused, for a target that had nothing wrong."""
    target, _ = await fakes.target("t1")
    requests, process = await fakes.orchestrator()
    target.before = fail_the_bad
    async with Client(process.address, patience_seconds=0.0) as client:
        bad = asyncio.create_task(read(client, BAD_OPTIONS, BAD))
        while not bad.done():  # which has a deadline of its own
            assert (await read(client, replace(OPTIONS, request_id=""))).token_ids == expected(fakes)
        with pytest.raises(BoughError, match="this request fails at every target with its model") as failure:
            await bad
        assert type(failure.value) is BoughError
        assert (await read(client)).token_ids == expected(fakes)
    assert requests.directory.has_target


async def test_a_request_that_crashes_targets_does_not_crash_all(fakes: Fleet) -> None:
    targets = [await fakes.target(f"t{index}") for index in range(MOST_TARGETS + 1)]
    _, process = await fakes.orchestrator(num_targets=len(targets))
    killed = []

    def hook_of(server: Process) -> Callable[[VerifyCall], Awaitable[None]]:
        async def hook(call: VerifyCall) -> None:
            if call.context.session_id.name == "bad":
                killed.append(server)
                asyncio.get_running_loop().create_task(server.kill())
                await asyncio.sleep(60)

        return hook

    for target, server in targets:
        target.before = hook_of(server)
    async with Client(process.address) as client:
        with pytest.raises(BoughError, match=f"this request has failed at {MOST_TARGETS} targets in a row") as failure:
            await asyncio.wait_for(read(client, BAD_OPTIONS, BAD), 60)
        assert type(failure.value) is BoughError, "a client does not ask again"
        assert len(killed) == MOST_TARGETS
        assert (await read(client, replace(OPTIONS, request_id=""))).token_ids == expected(fakes)


async def test_a_request_waiting_for_kv_survives_lost_targets(fakes: Fleet) -> None:
    """Each poll for room that was lost counted as a failure of the request: at the third it ended as INTERNAL."""
    polled = asyncio.Event()

    async def full_target(name: str) -> Process:
        """A target without room, at which the third call stays unanswered."""
        target, server = await fakes.target(name)
        target.num_slots = 0
        target.before = once(partial(_hold, polled), 3)
        return server

    server = await full_target("t0")
    _, process = await fakes.orchestrator(poll_seconds=0.05)
    async with Client(process.address, patience_seconds=0.0) as client:
        reading = asyncio.create_task(read(client))
        for index in range(MOST_TARGETS + 1):
            await asyncio.wait_for(polled.wait(), 30)
            polled.clear()
            is_last = index == MOST_TARGETS
            following = (await fakes.target("last"))[1] if is_last else await full_target(f"t{index + 1}")
            await server.kill()
            server = following
        seen = await asyncio.wait_for(reading, 30)
    assert seen.token_ids == expected(fakes)


async def _hold(reached: asyncio.Event) -> None:
    reached.set()
    await asyncio.sleep(60)


def test_successive_faults_end_with_an_answer_or_a_loss_without_the_call() -> None:
    """But a call that brings down a target each time it has room does not continue forever."""
    refused = NoAnswer("failed to connect")
    trouble = _Trouble(time.monotonic())
    for elsewhere in (trouble.answered, lambda: trouble.count(refused)):
        for _ in range(MOST_TARGETS - 1):
            trouble.count(NoAnswer("connection reset", was_connected=True))
        assert not trouble.is_own_fault
        elsewhere()
        assert trouble.num_in_row == 0
    trouble.count(Unavailable("it drains"))
    for _ in range(MOST_IN_ALL - trouble.num_in_all):
        assert not trouble.is_own_fault
        trouble.count(NoAnswer("connection reset", was_connected=True))
        trouble.answered()
    assert trouble.is_own_fault


async def test_successive_faults_are_counted_anew_when_a_target_is_lost_without_the_call(fakes: Fleet) -> None:
    await fakes.target("t1")
    requests, _ = await fakes.orchestrator()
    verifier, lost = requests.rounds.verifier, NoAnswer("connection reset", was_connected=True)
    mine, others = _Trouble(0.0), _Trouble(0.0)
    for number in range(MOST_TARGETS - 1):
        for trouble in (mine, others):
            verifier._note_loss(f"shared-{number}", trouble, lost)
            trouble.count(lost)
    assert mine.num_in_row == others.num_in_row == MOST_TARGETS - 1, "both were there each time"
    verifier._note_loss("without mine", others, lost)
    verifier._note_loss("the next", mine, lost)
    mine.count(lost)
    others.count(lost)
    assert (mine.num_in_row, others.num_in_row) == (1, MOST_TARGETS)


async def test_the_sessions_of_a_lost_target_are_divided_among_the_others(fakes: Fleet) -> None:
    """All choose at the same moment: 20 of 20 went to one of two idle targets, and computed their texts there."""
    lost, server = await fakes.target("lost")
    requests, process = await fakes.orchestrator()
    num_calls = 0

    async def hold(call: VerifyCall) -> None:
        nonlocal num_calls
        num_calls += 1
        await asyncio.sleep(60)

    lost.before = hold
    options = [replace(OPTIONS, request_id=f"r{index}") for index in range(20)]
    async with Client(process.address) as client:
        running = [asyncio.create_task(read(client, each)) for each in options]
        await until(lambda: num_calls == len(options))
        others = [(await fakes.target(name))[0] for name in ("t1", "t2")]
        await until(lambda: len(requests.directory.targets) == 3)
        await server.kill()
        for seen in await asyncio.wait_for(asyncio.gather(*running), 60):
            assert (seen.token_ids, seen.end.num_failovers) == (expected(fakes), 1)
    shares = [len(target.epochs) for target in others]
    assert sum(shares) == len(options)
    assert max(shares) <= 13
    await until(lambda: not any(target.num_running for target in requests.directory.targets))


async def test_the_duration_of_a_call_is_no_time_without_a_target(
    fakes: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that was lost minutes after an earlier fault of the same call was not waited for at all."""
    await fakes.target("t1")
    requests, _ = await fakes.orchestrator("--failover-timeout", "5")
    (target,) = requests.directory.targets
    verifier, place = requests.rounds.verifier, TargetPlace(target)
    monkeypatch.setattr(Verifier, "_successor", AsyncMock(side_effect=[None, None, target]))
    trouble = _Trouble(time.monotonic() - 600.0)
    exc = NoAnswer("gone")
    await verifier._recover(Mock(session_id=ScopedId("s")), place, 1, trouble, exc)
    assert 0 < trouble.away_seconds < 5
    trouble.away_seconds = 10.0
    monkeypatch.setattr(Verifier, "_successor", AsyncMock(return_value=None))
    with pytest.raises(Unavailable, match="no target with this model could be used for 5 s"):
        await verifier._recover(Mock(session_id=ScopedId("s")), place, 1, trouble, exc)
