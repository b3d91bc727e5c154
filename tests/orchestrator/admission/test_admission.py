"""Places, the queue for them, deadlines, and the limits of an API key."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from types import SimpleNamespace

import pytest

from bough.errors import DeadlineExceeded, Exhausted, Unavailable
from bough.protocol.decision import RoundTimings
from bough.protocol.generation import PromptLogprobs, Started, Tokens
from bough.protocol.ids import ScopedId
from bough.security.keys import ApiKey
from orchestrator.admission.active_streams import Stream
from orchestrator.admission.admission import LONGEST_RETRY_SECONDS, SHORTEST_RETRY_SECONDS, Admission, Hold
from orchestrator.serving.tenants import Tenant, TenantUsage
from orchestrator.sessions.session import LATE_SECONDS, Deadline
from tests.fakes.waiting import PATIENCE_SECONDS


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def placed(
    admission: Admission, deadline: Deadline | None = None, hold: Hold | None = None, earlier: Hold | None = None
) -> AsyncIterator[None]:
    """A place for as long as the block runs."""
    hold = hold or Hold()
    with admission.holding(hold, earlier):
        await admission.place(hold, deadline or Deadline())
        yield


class Guests:
    """Requests that keep their places until the test ends them."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.placed: list[int] = []
        self._leaving: dict[int, asyncio.Event] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def come(self, *numbers: int, queue_seconds: float = float("inf")) -> None:
        for number in numbers:
            self._leaving[number] = asyncio.Event()
            self._tasks[number] = asyncio.create_task(self._stay(number, Deadline(queue_seconds=queue_seconds)))
        await asyncio.sleep(0)

    async def leave(self, number: int) -> None:
        self._leaving[number].set()
        await self._tasks[number]

    async def cancel(self, number: int) -> None:
        self._tasks[number].cancel()
        await asyncio.wait({self._tasks[number]})

    async def outcome(self, number: int) -> None:
        await self._tasks[number]

    async def send_away(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _stay(self, number: int, deadline: Deadline) -> None:
        async with placed(self.admission, deadline):
            self.placed.append(number)
            await self._leaving[number].wait()


Party = Callable[[Admission], Guests]


@pytest.fixture
async def party() -> AsyncIterator[Party]:
    """Makes guests who are sent away in the end."""
    parties: list[Guests] = []

    def make(admission: Admission) -> Guests:
        parties.append(Guests(admission))
        return parties[-1]

    yield make
    for guests in parties:
        await guests.send_away()


async def test_places_are_given_in_order_of_arrival(party: Party) -> None:
    guests = party(Admission(2, 10))
    await guests.come(0, 1, 2, 3, 4)
    assert (guests.placed, guests.admission.num_waiting) == ([0, 1], 3)
    await guests.leave(1)
    await guests.come(5)  # one that comes in this moment does not overtake those who wait
    assert guests.placed == [0, 1, 2]
    for leaving in (0, 2, 3, 4, 5):
        await guests.leave(leaving)
    assert guests.placed == [0, 1, 2, 3, 4, 5]
    await guests.come(6, 7)
    assert guests.placed[-2:] == [6, 7]  # and all places are there again


async def test_a_turn_granted_while_its_caller_leaves_is_not_lost(party: Party) -> None:
    """The future has its result, and the task that waits for it is cancelled before it runs."""
    guests = party(Admission(1, 10))
    await guests.come(0, 1, 2)
    leaving = asyncio.create_task(guests.leave(0))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while guests.admission.num_waiting == 2:
            await asyncio.sleep(0)
    assert guests.placed == [0]
    await guests.cancel(1)
    await leaving
    await asyncio.sleep(0)
    assert guests.placed == [0, 2]


async def test_a_full_queue_refuses_at_once_with_a_retry_delay(party: Party) -> None:
    clock = Clock()
    guests = party(Admission(2, 1, clock))
    await guests.come(0, 1, 2)
    clock.now += 8.0
    with pytest.raises(Exhausted, match=r"2 requests run and 1 wait.* or this one in 4\.0 s") as caught:
        await placed(guests.admission).__aenter__()
    assert caught.value.retry_seconds == pytest.approx(4.0)  # two places that are held for 8 s
    assert guests.admission.num_waiting == 1


async def test_refused_callers_get_different_retry_delays(party: Party) -> None:
    clock = Clock()
    guests = party(Admission(1, 0, clock))
    await guests.come(0)
    clock.now += 10.0
    delays = []
    for _ in range(8):
        with pytest.raises(Exhausted) as caught:
            await placed(guests.admission).__aenter__()
        delays.append(caught.value.retry_seconds)
    assert delays == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, LONGEST_RETRY_SECONDS, LONGEST_RETRY_SECONDS]
    clock.now += 1000.0  # long after, and the place is still held: it might never come free, but a minute is the most
    assert guests.admission.exhausted("x").retry_seconds == LONGEST_RETRY_SECONDS


async def test_the_retry_delay_follows_recent_request_durations() -> None:
    clock = Clock()
    admission = Admission(4, 0, clock)
    assert admission.exhausted("nothing is known yet").retry_seconds == SHORTEST_RETRY_SECONDS
    for seconds in (100.0, *[20.0] * 32):
        async with placed(admission):
            clock.now += seconds
    assert admission.wait_seconds == 0.0  # places are free
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(placed(admission))
        assert admission.wait_seconds == pytest.approx(5.0)
        assert admission.exhausted("x").retry_seconds == pytest.approx(5.0)


async def test_waiting_is_limited(party: Party) -> None:
    guests = party(Admission(1, 10))
    await guests.come(0)
    await guests.come(1, queue_seconds=0.05)
    with pytest.raises(Exhausted, match=r"no place came free in 0\.05 s \(--queue-timeout\)") as caught:
        await guests.outcome(1)
    assert caught.value.retry_seconds is not None
    assert guests.admission.num_waiting == 0
    await guests.leave(0)
    await guests.come(2)
    assert guests.placed == [0, 2]


async def test_closing_refuses_new_callers_and_serves_the_queue(party: Party) -> None:
    """To a client of HTTP a refusal after it had been accepted would be a failed request."""
    guests = party(Admission(1, 10))
    await guests.come(0, 1)
    guests.admission.close("draining")
    await guests.come(2)
    with pytest.raises(Unavailable, match="draining"):
        await guests.outcome(2)
    for number in (0, 1):
        await guests.leave(number)
    assert guests.placed == [0, 1]
    assert guests.admission.is_closed


async def test_a_call_that_resumes_a_request_gets_its_place_at_once() -> None:
    """It was refused where no other was free, or put behind all who wait, though the earlier call was about to end."""
    admission, earlier = Admission(1, 0), Hold()
    async with placed(admission, hold=earlier), placed(admission, Deadline(queue_seconds=0.0), earlier=earlier):
        with pytest.raises(Exhausted):
            await placed(admission).__aenter__()
    async with placed(admission, Deadline(queue_seconds=0.0)):  # the place is there again, once
        with pytest.raises(Exhausted):
            await placed(admission).__aenter__()


async def test_a_call_that_resumes_a_queued_request_gets_its_turn() -> None:
    admission, holds, came = Admission(1, 2), [Hold() for _ in range(3)], []

    async def come(number: int, earlier: Hold | None = None) -> None:
        async with placed(admission, hold=holds[number], earlier=earlier):
            came.append(number)

    async with placed(admission):
        waiting = [asyncio.create_task(come(number)) for number in range(2)]
        await asyncio.sleep(0)
        resuming = asyncio.create_task(come(2, earlier=holds[0]))
        await asyncio.sleep(0)
        assert admission.num_waiting == 2
        waiting[0].cancel()
    await asyncio.gather(resuming, waiting[1])
    assert came == [2, 1]
    async with placed(admission, Deadline(queue_seconds=0.0)):
        assert admission.num_waiting == 0


async def test_the_limit_holds_and_no_caller_is_forgotten() -> None:
    """Hundreds of requests that stay, leave the queue or break off at random: places neither leak nor multiply."""
    chance = random.Random(5)
    admission = Admission(5, 20)
    running = most = finished = 0

    async def one() -> None:
        nonlocal running, most, finished
        async with placed(admission, Deadline(queue_seconds=chance.choice([0.001, 10.0]))):
            running += 1
            most = max(most, running)
            try:
                await asyncio.sleep(chance.random() * 0.02)
                if chance.random() < 0.2:
                    raise KeyError
                finished += 1
            finally:
                running -= 1

    tasks = []
    for _ in range(400):
        tasks.append(asyncio.create_task(one()))
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
        await asyncio.sleep(chance.random() * 0.001)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 5
    assert finished > 100
    assert {type(result) for result in results} <= {
        type(None), KeyError, Exhausted, asyncio.CancelledError,
    }  # fmt: skip
    async with AsyncExitStack() as stack:  # all five places are there
        for _ in range(5):
            await stack.enter_async_context(placed(admission, Deadline(queue_seconds=0.0)))
        assert admission.num_waiting == 0


async def test_all_waits_of_a_request_share_one_time_limit() -> None:
    deadline = Deadline(queue_seconds=60.0)
    with deadline.waiting():
        await asyncio.sleep(0.05)
    assert 0 < deadline.queue_seconds <= 59.95
    deadline.queue_seconds = 0.05
    with deadline.waiting():
        await asyncio.sleep(0.06)
    assert deadline.queue_seconds == 0.0


async def test_a_workers_time_limit_is_the_requests_remaining_time() -> None:
    """And a little more, so that a late request is not counted as a fault of the worker."""
    now = time.monotonic()
    assert Deadline().within(600.0) == 600.0
    assert Deadline(now + 500.0, 1.0).within(2.0) == 2.0
    assert Deadline(now - 5.0, 1.0).within(600.0) == 0.0
    left = Deadline.of(500.0, 1.0).within(600.0) - LATE_SECONDS
    assert 500.0 - (time.monotonic() - now) <= left <= 500.0


async def test_work_ends_at_the_deadline_even_during_a_wait() -> None:
    may_go_on, ends = asyncio.Event(), list[str]()

    async def work() -> int:
        try:
            await may_go_on.wait()
        finally:
            ends.append("closed")
        return 1

    with pytest.raises(DeadlineExceeded, match=r"deadline: the caller's deadline .* has passed"):
        await Stream(ScopedId("r"), ScopedId(), deadline=Deadline.of(1.0, 0.0)).before_end(work())
    assert ends == ["closed"]
    may_go_on.set()
    assert await Stream(ScopedId("r"), ScopedId(), deadline=Deadline.of(60.0, 0.0)).before_end(work()) == 1


async def test_a_stream_can_be_ended_just_after_its_deadline() -> None:
    """Its timeout, which is the deadline's, cannot be moved any more; others were not ended after that error."""
    stream, errors = Stream(ScopedId("r"), ScopedId(), deadline=Deadline.of(0.02, 0.0)), list[Exception]()

    def end() -> None:
        try:
            stream.end()
        except RuntimeError as exc:
            errors.append(exc)

    loop = asyncio.get_running_loop()
    loop.call_at(stream.deadline.deadline + 0.001, end)
    loop.call_soon(time.sleep, 0.1)  # so that both are due when the loop continues
    assert await stream.before_end(asyncio.sleep(60)) is None
    assert not errors


STARTED = Started("r", 1, 1, "m")


def tokens(number: int) -> Tokens:
    return Tokens((7,) * number, (False,) * number, ("",) * number, (), 0, 0, RoundTimings())


def test_concurrent_requests_are_counted_by_tenant() -> None:
    usage, key = TenantUsage(), ApiKey("alice", "0" * 64, requests=2)
    with usage.request(key), usage.request(key):
        with pytest.raises(Exhausted, match="requests: 2 of this key run") as refused, usage.request(key):
            pass
        assert refused.value.retry_seconds
        with usage.request(ApiKey("bob", "1" * 64, requests=1)):
            pass
    with pytest.raises(ValueError, match="broken"), usage.request(key):
        raise ValueError("broken")
    with usage.request(key), usage.request(key):
        pass


def test_used_tokens_count_against_the_following_minutes() -> None:
    now = [100.0]
    usage, key = TenantUsage(clock=lambda: now[0]), ApiKey("alice", "0" * 64, tokens_per_minute=60)
    with usage.request(key) as count:
        count(Started("r", 30, 1, "m"))
        count(PromptLogprobs((7,) * 30, ()))  # no further tokens
        count(tokens(90))  # what runs is not cut short
    with pytest.raises(Exhausted, match="tokens_per_minute: this key's 60 are used") as refused, usage.request(key):
        pass
    assert refused.value.retry_seconds == pytest.approx(60.0)
    now[0] += 59.0
    with pytest.raises(Exhausted), usage.request(key):
        pass
    now[0] += 1.5
    with usage.request(key) as count:
        count(tokens(30))
    now[0] += 3600.0  # time that was not used is not saved up
    with usage.request(key) as count:
        count(tokens(61))
    with pytest.raises(Exhausted), usage.request(key):
        pass


def test_of_too_many_sessions_the_longest_unused_are_given_up_and_none_in_use() -> None:
    usage, key = TenantUsage(), ApiKey("alice", "0" * 64, sessions=2)

    def used(name: str) -> list[str]:
        with usage.request(key, name) as count:
            count(STARTED)
            return closed()

    def closed() -> list[str]:
        names = usage.surplus(key)
        assert usage.surplus(key) == names, "what was not closed is asked for again"
        for name in names:
            usage.forget(key, name)
        return names

    assert [used(name) for name in ("a", "b", "a", "c", "", "c")] == [[], [], [], ["b"], [], []]
    with usage.request(key, "a") as first, usage.request(key, "a") as second:
        first(STARTED)
        second(STARTED)
        with usage.request(key, "x"):
            assert usage.surplus(key) == [], "it has not been let in"
        with usage.request(key, "d") as count:
            count(STARTED)
            assert closed() == ["c"]
            with pytest.raises(Exhausted, match="sessions: a request runs in each of this key's 2 sessions") as refused:
                used("e")
            assert refused.value.retry_seconds
            with usage.request(key), usage.request(ApiKey("bob", "1" * 64, sessions=1), "e"):
                pass
        assert used("e") == ["d"]
    usage.forget(key, "a")
    usage.forget(ApiKey("nobody", "2" * 64), "a")
    assert used("f") == []


def test_waiting_requests_count_for_their_sessions() -> None:
    """Otherwise as many would run at once as come together, and a session would be closed under one that waits."""
    usage, key = TenantUsage(), ApiKey("alice", "0" * 64, sessions=1)
    with usage.request(key, "a") as count:
        count(STARTED)
    with usage.request(key, "a"):  # waits
        with (
            pytest.raises(Exhausted, match="sessions: a request runs in each of this key's 1 sessions"),
            usage.request(key, "b"),
        ):
            pass
        assert usage.surplus(key) == []
    with usage.request(key, "b"), pytest.raises(Exhausted), usage.request(key, "a"):
        pass
    with usage.request(key, "b") as count:
        count(STARTED)
        assert usage.surplus(key) == ["a"]


def test_a_session_closed_during_its_request_is_forgotten_at_its_end() -> None:
    usage, key = TenantUsage(), ApiKey("alice", "0" * 64, sessions=1)
    with usage.request(key, "a") as first:
        first(STARTED)
        usage.forget(key, "a")
        with usage.request(key, "a") as second:
            second(STARTED)
        with pytest.raises(Exhausted), usage.request(key, "b"):
            pass
    with usage.request(key, "b") as count:
        count(STARTED)
        assert usage.surplus(key) == ["a"]


async def test_a_session_whose_request_begins_while_another_is_closed_is_kept() -> None:
    """Its request was ended, as of a session that had been given up."""
    usage, key = TenantUsage(), ApiKey("alice", "0" * 64, sessions=1)
    running, closed = ExitStack(), list[str]()

    async def close_session(session_id: ScopedId) -> None:
        closed.append(session_id)
        if len(closed) == 1:
            running.enter_context(usage.request(key, "b"))

    for name in ("a", "b", "c"):
        with usage.request(key, name) as count:
            count(STARTED)
    requests = SimpleNamespace(directory=SimpleNamespace(index_problem=""), close_session=close_session)
    with running:
        await Tenant(requests, usage, key)._close_surplus()
    assert closed == [ScopedId("a", "alice")]
