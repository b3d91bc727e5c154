"""At which target a request is run: by what it would take there, and where there is room."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from bough.client import Client
from bough.errors import Exhausted
from bough.protocol.cost_curve import CostCurve
from bough.protocol.generation import GenerateOptions, TextPrompt, TokenPrompt, WorkerInfo
from bough.protocol.messages import VerifyCall
from bough.protocol.prefix_hash import block_hashes
from bough.registry.records import WorkerLoad
from orchestrator.cluster.worker_handle import Need, UsualRound, expected_seconds
from orchestrator.serving.requests import Requests
from orchestrator.sizing.round_times import WorkerTimes
from tests.fakes.fleet import FakeTarget, Fleet
from tests.fakes.streams import OPTIONS, once, read
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow  # running services are called
SYSTEM = tuple(index % 200 for index in range(100))  # three blocks, and a little more
TURN = GenerateOptions(seed=3, max_tokens=20, ignore_eos=True)
LINK_BOUND = CostCurve((1, 256, 1024), (1.0, 1.0, 4.0))  # up to 256 rows a sweep costs what one does
BUSY = WorkerLoad(kv_bytes=1000, kv_used_bytes=500)
FULL = WorkerLoad(kv_bytes=1000, kv_used_bytes=990)


def seconds(worker_id: str, need: Need, num_running: int = 0, load: WorkerLoad = WorkerLoad()) -> float:  # noqa: B008
    info = WorkerInfo("target", worker_id, "m", "d", "f", "t", 262, 8192, 64, 8, cost=LINK_BOUND)
    speed = WorkerTimes()
    speed.update(worker_id, LINK_BOUND)
    return expected_seconds(speed, UsualRound(), info, load, num_running, need)


def test_a_prefix_is_worth_its_computing_time() -> None:
    """100 tokens fit the sweep that is made anyway; 4,000 are seconds."""
    short, long = Need(100, 64, {"holder": 96}), Need(4000, 64, {"holder": 3968})
    assert seconds("holder", short) == seconds("other", short)
    assert seconds("holder", long) < seconds("other", long) - 10
    assert seconds("holder", short, num_running=2) > seconds("other", short)
    assert seconds("holder", long, num_running=2) < seconds("other", long)
    assert seconds("holder", long, num_running=200) > seconds("other", long)


def test_the_load_of_other_orchestrators_counts() -> None:
    need = Need(100, 64, {})
    assert seconds("t", need, load=BUSY) > seconds("t", need)
    assert seconds("t", need, 4, BUSY) == seconds("t", need, 4), "these are the same sessions"


def test_without_room_a_session_must_end_first() -> None:
    need = Need(2000, 64, {"full": 1984})
    assert seconds("full", need, 8, FULL) > seconds("full", need, 8) + 1
    at_home = replace(need, home_id="full")
    assert seconds("full", at_home, 8, FULL) < seconds("full", need, 8, FULL), "the session has its slot there"


async def noted(fakes: Fleet, client: Client, targets: list[FakeTarget]) -> FakeTarget:
    """One of the targets holds SYSTEM, and the index knows."""
    await read(client, TURN, TokenPrompt((*SYSTEM, 1)))
    names = [worker.worker_id for worker in await fakes.registry.workers() if worker.kind == "target"]
    # Prefixes are noted behind the stream's back.
    await until(lambda: fakes.registry.find_prefixes("fake", block_hashes(SYSTEM), names))
    (holder,) = [target for target in targets if target.calls]
    return holder


async def test_a_shared_prefix_does_not_send_all_requests_to_one_target(fakes: Fleet) -> None:
    """30 of 30 requests went to the one target of three that held one block of all of them."""
    targets = [(await fakes.target(f"t{index}"))[0] for index in range(3)]
    _, process = await fakes.orchestrator(num_targets=3)
    async with Client(process.address) as client:
        await noted(fakes, client, targets)
        all_there, num_there = asyncio.Event(), 0

        async def meet(call: VerifyCall) -> None:
            nonlocal num_there
            if call.round == 0:
                num_there += 1
                if num_there == 30:
                    all_there.set()
                await asyncio.wait_for(all_there.wait(), 20)

        before = [len(target.epochs) for target in targets]
        for target in targets:
            target.before = meet
        prompts = [TokenPrompt((*SYSTEM, 2 + index)) for index in range(30)]
        await asyncio.gather(*(read(client, TURN, prompt) for prompt in prompts))
    shares = [len(target.epochs) - then for target, then in zip(targets, before, strict=True)]
    assert sum(shares) == 30
    assert max(shares) <= 12


async def full_and_idle(fakes: Fleet) -> tuple[Requests, Client, FakeTarget, FakeTarget]:
    """A target that holds SYSTEM and has no room, and another that has, and not SYSTEM."""
    targets = [(await fakes.target(f"t{index}"))[0] for index in range(2)]
    requests, process = await fakes.orchestrator("--queue-timeout", "20", num_targets=2)
    client = Client(process.address, patience_seconds=0.0)
    holder = await noted(fakes, client, targets)
    holder.num_slots = 0
    (idle,) = [target for target in targets if target is not holder]
    return requests, client, holder, idle


async def test_a_full_target_passes_requests_on_to_one_with_room(fakes: Fleet) -> None:
    """The one that held the prefix was full, the other idle, and the request ended as Exhausted."""
    _, client, holder, idle = await full_and_idle(fakes)
    async with client:
        num_before = len(holder.calls)
        seen = await read(client, TURN, TokenPrompt((*SYSTEM, 2)))
        assert (seen.end.num_failovers, seen.end.warnings) == (0, ())
        assert len(holder.calls) == num_before
        assert len(idle.calls) > 0
        plain = holder.text.output([*SYSTEM, 2], 3, 20)
    assert seen.token_ids == plain


async def test_requests_waiting_for_room_are_served_in_order_and_send_their_context_once(fakes: Fleet) -> None:
    target, _ = await fakes.target("t")
    requests, process = await fakes.orchestrator("--queue-timeout", "60")
    target.num_slots = 0
    sent: list[str] = []  # sessions, each time that their context comes

    async def note(call: VerifyCall) -> None:
        if call.round == 0 and call.context.tokens:
            sent.append(call.context.session_id.name)

    target.before = note
    async with Client(process.address) as client:
        names = [f"s{index}" for index in range(4)]
        reading = []
        for number, name in enumerate(names):
            options = replace(OPTIONS, request_id=name, session_id=name)
            reading.append(asyncio.create_task(read(client, options)))
            await until(lambda wanted=number + 1: requests.loads().num_requests_waiting == wanted)
        await until(lambda: len(target.asked_for_room) >= 3)
        assert set(target.asked_for_room) == {"s0"}, "one asks for all"
        for number in range(4):
            target.num_slots = number + 1
            await asyncio.wait_for(reading[number], 20)
            assert [name for name in names if target.epochs.get(name) and name in target.held] == names[: number + 1]
    assert sent == ["s0", *names], "s0 once in vain"


async def test_waiting_for_room_is_limited(fakes: Fleet) -> None:
    target, _ = await fakes.target("t")
    requests, process = await fakes.orchestrator("--queue-timeout", "1")
    target.num_slots = 0
    async with Client(process.address, patience_seconds=0.0) as client:
        options = [replace(OPTIONS, request_id=f"{index}") for index in range(3)]
        ends = await asyncio.gather(*(read(client, each) for each in options), return_exceptions=True)
    assert [type(end) for end in ends] == [Exhausted] * 3
    assert all(isinstance(end, Exhausted) and (end.retry_seconds or 0) >= 1 for end in ends)
    assert requests.loads().num_requests_waiting == 0
    assert [known.num_running for known in requests.directory.targets] == [0]


async def test_a_session_that_outgrows_its_slot_waits_at_its_target(fakes: Fleet) -> None:
    target, _ = await fakes.target("t1")
    other, _ = await fakes.target("t2")
    _, process = await fakes.orchestrator(num_targets=2)
    for each in (target, other):
        each.before = once(_refuse, 3)
    async with Client(process.address) as client:
        seen = await read(client, OPTIONS, TextPrompt("x"))
    assert seen.token_ids
    assert not target.calls or not other.calls


async def _refuse() -> None:
    raise Exhausted("KV memory: no room to grow")


@pytest.mark.parametrize("num_slots", [0, 1])
async def test_a_kept_session_waits_for_its_turn_and_keeps_its_tokens(fakes: Fleet, num_slots: int) -> None:
    """Cached tokens are not sent again, whether its slot was kept or its room is requested again."""
    target, _ = await fakes.target("t")
    _, process = await fakes.orchestrator("--queue-timeout", "60")
    options = replace(TURN, session_id="s")
    async with Client(process.address) as client:
        first = await read(client, options, TokenPrompt(SYSTEM))
        target.num_slots = num_slots
        second = await read(client, replace(options, continues=True), TextPrompt("more"))
    assert second.end.usage.cached_tokens == len(SYSTEM) + len(first.token_ids) - 1


async def test_a_draining_target_gets_no_new_requests(fakes: Fleet) -> None:
    """As it empties it looks quicker than any other, but it would refuse every request."""
    leaving, staying = [(await fakes.target(f"t{index}"))[0] for index in range(2)]
    requests, process = await fakes.orchestrator(num_targets=2, poll_seconds=1000.0)  # then the test says who is listed
    known = {target.record.worker_id: target for target in requests.directory.targets}
    known["t0"].num_missing, known["t1"].num_running = 2, 3
    async with Client(process.address) as client:
        await read(client, TURN, TokenPrompt(SYSTEM))
    assert (len(leaving.calls) > 0, len(staying.calls) > 0) == (False, True)
