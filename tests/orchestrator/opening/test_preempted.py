"""Requests preempted in mid-text: they wait, and continue with nothing lost or repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from bough.client import Client
from bough.errors import Exhausted
from bough.protocol.generation import Finished, Started
from bough.protocol.ids import ScopedId
from bough.protocol.messages import VerifyCall
from orchestrator.cluster.target_place import SlotQueue
from tests.fakes.fleet import FakeTarget, Fleet
from tests.fakes.streams import OPTIONS, PROMPT, expected, read
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow  # running services are called
FIRST = replace(OPTIONS, session_id="first")
LATER = replace(OPTIONS, session_id="later", request_id="later")


def preempting(target: FakeTarget, at_round: int, name: str = "first") -> Callable[[VerifyCall], Awaitable[None]]:
    """Takes a session's slot away, once, before its call of that round is acted on."""
    has_acted = False

    async def hook(call: VerifyCall) -> None:
        nonlocal has_acted
        if not has_acted and call.context.session_id.name == name and call.round == at_round:
            has_acted = True
            target.preempt(name)

    return hook


async def test_a_preempted_request_continues_at_its_target_once_there_is_room(fakes: Fleet) -> None:
    target, _ = await fakes.target("t")
    requests, process = await fakes.orchestrator("--queue-timeout", "0.05")
    target.before = preempting(target, 7)
    async with Client(process.address, patience_seconds=0.0) as client:
        reading = asyncio.create_task(read(client, FIRST))
        await until(lambda: target.asked_for_room.count("first") >= 2)
        assert requests.loads().num_requests_waiting == 1, "--queue-timeout is for those who have not begun"
        target.num_slots = 1
        seen = await asyncio.wait_for(reading, 20)
    assert seen.token_ids == expected(fakes)
    assert seen.end.num_failovers == 0
    (warning,) = seen.end.warnings
    assert warning == "t: KV memory was full (--kv-memory); this request gave way to older ones for a while"
    assert [known.num_running for known in requests.directory.targets] == [0]


async def test_a_preempted_request_continues_at_any_target_with_room(fakes: Fleet) -> None:
    targets = [(await fakes.target(f"t{index}"))[0] for index in range(2)]
    _, process = await fakes.orchestrator(num_targets=2)
    for target in targets:
        target.before = preempting(target, 7)
    async with Client(process.address) as client:
        seen = await asyncio.wait_for(read(client, FIRST), 20)
    assert seen.token_ids == expected(fakes)
    assert sorted(len(target.held) + len(target.released) for target in targets) == [0, 1]
    assert all(target.calls for target in targets)


async def test_a_request_that_lost_its_slot_waits_like_others_and_continues_at_any_target_with_room(
    fakes: Fleet,
) -> None:
    """Its lease had ended, as when nobody read for long: it sent its whole text every moment to a target without room,
    past those who were in line, and looked at no other."""
    targets = [(await fakes.target(f"t{index}"))[0] for index in range(2)]
    _, process = await fakes.orchestrator(num_targets=2)

    lost_at: list[FakeTarget] = []

    def evicting(target: FakeTarget) -> Callable[[VerifyCall], Awaitable[None]]:
        async def hook(call: VerifyCall) -> None:
            if call.round == 7 and not lost_at:
                lost_at.append(target)
                del target.held["first"]
                target.num_slots = 0

        return hook

    for target in targets:
        target.before = evicting(target)
    async with Client(process.address) as client:
        seen = await asyncio.wait_for(read(client, FIRST), 20)
    assert seen.token_ids == expected(fakes)
    assert (seen.end.num_failovers, seen.end.warnings) == (0, ())
    assert all(target.calls for target in targets)
    assert all("first" in target.asked_for_room for target in targets), "without its context, one after the other"


async def test_preempted_requests_come_before_those_that_have_not_begun(fakes: Fleet) -> None:
    """It was asked for first, though it joins those who wait last."""
    target, _ = await fakes.target("t")
    target.num_slots = 1
    requests, process = await fakes.orchestrator()
    may_go_on = asyncio.Event()
    preempt = preempting(target, 7)

    async def hold_up(call: VerifyCall) -> None:
        if call.context.session_id.name == "first" and call.round == 7:
            await may_go_on.wait()
        await preempt(call)

    target.before = hold_up
    async with Client(process.address) as client:
        first = asyncio.create_task(read(client, FIRST))
        await until(lambda: "first" in target.held)
        later = asyncio.create_task(read(client, LATER))
        await until(lambda: "later" in target.asked_for_room)
        may_go_on.set()
        await until(lambda: "first" in target.asked_for_room)
        assert target.num_slots == 0
        target.num_slots = 1
        assert (await asyncio.wait_for(first, 20)).token_ids == expected(fakes)
        assert "later" not in target.held
        target.num_slots = 2
        assert (await asyncio.wait_for(later, 20)).token_ids == expected(fakes)
    assert requests.loads().num_requests_waiting == 0


async def test_an_aborted_request_leaves_the_queue_before_its_last_event_is_read(fakes: Fleet) -> None:
    target, _ = await fakes.target("t")
    target.num_slots = 0
    requests, _ = await fakes.orchestrator()
    aborted = requests.generate(PROMPT, FIRST)
    assert isinstance(await anext(aborted), Started)
    last = asyncio.create_task(anext(aborted))
    await until(lambda: "first" in target.asked_for_room)
    requests.abort(ScopedId(FIRST.request_id))
    assert isinstance(await last, Finished)
    target.num_slots = 1
    later = [event async for event in requests.generate(PROMPT, LATER, timeout_seconds=20)]
    assert isinstance(later[-1], Finished)
    await aborted.aclose()


async def test_the_oldest_request_comes_first_in_any_order_of_arrival() -> None:
    line, came = SlotQueue(), []

    async def wait(epoch: int) -> None:
        with line.place(epoch) as place:
            await place.first(float("inf"))
            came.append(epoch)

    with line.place(5) as first:
        await first.first(float("inf"))
        waiting = [asyncio.create_task(wait(epoch)) for epoch in (9, 7, 8)]
        await asyncio.sleep(0)
        with line.place(3) as older:
            await older.first(float("inf"))
            with pytest.raises(Exhausted, match="no KV slot came free in time"):
                await first.first(0.0)
    await asyncio.gather(*waiting)
    assert came == [7, 8, 9]
    assert line.is_empty
