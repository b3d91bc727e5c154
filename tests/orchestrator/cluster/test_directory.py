"""Which workers are known, how often those that do not answer are tried, and in which order rounds continue."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from unittest.mock import AsyncMock, Mock

import pytest
from tokenizers import Tokenizer

from bough import __version__
from bough.errors import NotFound, Unavailable
from bough.health.problems import find_problems
from bough.pb import common_pb2
from bough.protocol.generation import GenerateOptions, ServerInfo
from bough.registry.records import WorkerLoad, WorkerRecord
from orchestrator.cluster.directory import (
    LONGEST_PAUSE_SECONDS,
    MOST_MISSING,
    POLL_SECONDS,
    REMIND_SECONDS,
    Directory,
    UnreachedWorkers,
)
from orchestrator.cluster.served_models import TargetAway, targets_for
from orchestrator.cluster.worker_clients import IterationLimiter, TargetClient
from orchestrator.cluster.worker_handle import TargetHandle
from tests.fakes.fleet import FakeDraft, FakeTarget, Fleet
from tests.fakes.waiting import PATIENCE_SECONDS, until


def least_busy(directory: Directory) -> TargetHandle:
    """Of those that would serve a request without a past."""
    targets = targets_for(directory, GenerateOptions(), None, None)
    return min(targets, key=lambda target: target.busyness)


async def introduced(fakes: Fleet, *names: str) -> Directory:
    """A directory that does not poll, and knows all workers and targets of these names.

    Its `registry.workers` is a mock that goes on listing them.
    """
    for name in names:
        await fakes.target(name)
    listed = await fakes.registry.workers()
    directory = Directory(Mock(workers=AsyncMock(return_value=listed), sweep_expired=AsyncMock()))
    await directory.refresh()
    await until(lambda: len(directory.statuses()) == len(listed))
    return directory


async def test_between_equal_targets_the_less_busy_one_is_chosen(fakes: Fleet) -> None:
    """The load of other orchestrators is known from workers' reports, updated at every heartbeat."""
    (_, first), (_, second) = await fakes.target("a"), await fakes.target("b")
    requests, _ = await fakes.orchestrator(num_targets=2)
    directory = requests.directory
    for busy, idle in (("a", "b"), ("b", "a")):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while least_busy(directory).record.worker_id != idle:
                for worker_id, used in ((busy, 80), (idle, 20)):
                    there = first.address if worker_id == "a" else second.address
                    load = WorkerLoad(kv_bytes=100, kv_used_bytes=used)
                    await fakes.registry.register(WorkerRecord("target", worker_id, there, load))
                await asyncio.sleep(0.05)


async def test_present_workers_are_known_from_the_start(fakes: Fleet) -> None:
    """Otherwise an orchestrator just started would send its first requests away for want of a target."""
    await fakes.target("early")
    directory = Directory(fakes.registry)
    async with directory.running(first_look_seconds=60.0):
        assert least_busy(directory).record.worker_id == "early"


async def test_a_worker_that_does_not_answer_delays_no_start(fakes: Fleet) -> None:
    patient = asyncio.Event()

    class Silent(FakeTarget):
        async def GetServerInfo(self, request: object, context: object) -> object:
            await patient.wait()
            return await super().GetServerInfo(request, context)

    await fakes.worker(Silent("silent", fakes.tokenizer))
    directory = Directory(fakes.registry)
    async with directory.running(first_look_seconds=0.1):
        with pytest.raises(Unavailable, match="no target worker can be used: silent: has not reported yet"):
            least_busy(directory)
        patient.set()
        await until(lambda: directory.has_target)
        assert least_busy(directory).record.worker_id == "silent"


async def test_a_worker_is_forgotten_after_a_while_without_a_record_in_the_index(fakes: Fleet) -> None:
    """Looks in a row count, and not the clock: an index may be away for long and come back empty before it hears of
    the workers again, or this process may have been stopped."""
    directory = await introduced(fakes, "t")
    assert directory.has_target
    listing = directory.registry.workers
    named = listing.return_value
    for answers in ([[]] * MOST_MISSING, [named], [[]] * MOST_MISSING):
        for answer in answers:
            listing.return_value = answer
            await directory.refresh()
            assert directory.has_target
    await directory.refresh()
    assert not directory.has_target


async def test_a_different_tokenizer_of_a_draft_is_known_before_the_draft_is_called(fakes: Fleet) -> None:
    """Reading a vocabulary of 150,000 tokens takes the better part of a second, which the event loop has not."""
    await fakes.target("a")
    other = Tokenizer.from_str(fakes.tokenizer.tokenizer_json.decode())
    other.add_tokens(["another"])
    await fakes.worker(FakeDraft("b", replace(fakes.tokenizer, tokenizer_json=other.to_str().encode())))
    directory = Directory(fakes.registry)
    async with directory.running():
        await until(lambda: len(directory.statuses()) == 2)
        known = [directory.find(name) for name in "ab"]
        assert all("vocabulary" in vars(worker.tokenizer.files) for worker in known)
        assert any("its tokenizer differs from a's" in status.problem for status in directory.statuses())


async def test_the_connection_to_an_unusable_worker_is_closed(fakes: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that answered, but could not be compared with others, was called at each poll over a new connection."""
    opened, closed, close = list[TargetClient](), list[TargetClient](), TargetClient.close

    async def noted(client: TargetClient) -> None:
        closed.append(client)
        await close(client)

    async def fails(_: Directory, known: TargetHandle, others: object) -> None:
        opened.append(known.client)
        raise ZeroDivisionError

    monkeypatch.setattr(TargetClient, "close", noted)
    monkeypatch.setattr(Directory, "_read_vocabularies", fails)
    await fakes.target("odd")
    directory = Directory(fakes.registry)
    async with directory.running():
        await until(lambda: len(opened) >= 2)
        assert closed[:1] == opened[:1]
        assert not directory.has_target


async def test_a_target_stays_usable_while_the_index_is_away(fakes: Fleet) -> None:
    """Otherwise a target that ends while the index is away has no time to come back."""
    directory = await introduced(fakes, "t")
    before = directory.last_usable(lambda _: True)
    directory.registry.workers.side_effect = Unavailable("away")
    await directory.refresh()
    assert directory.last_usable(lambda _: True) > before


async def test_without_a_target_a_request_waits_for_one_that_serves_any_of_its_models(fakes: Fleet) -> None:
    """Whether it must name one is seen when they are back."""
    for name in "ab":
        await fakes.target_of(name, name)
    directory = await introduced(fakes)
    for target in directory.targets:
        target.problem = "gone"
    with pytest.raises(TargetAway):
        targets_for(directory, GenerateOptions(), None, None)
    with pytest.raises(NotFound, match=r"model: must be one of 'a', 'b', got 'c'"):
        targets_for(directory, GenerateOptions(model="c"), None, None)


async def test_a_target_of_another_release_is_not_waited_for(fakes: Fleet) -> None:
    class Newer(FakeTarget):
        async def GetServerInfo(self, request: object, context: object) -> common_pb2.WorkerInfo:
            info = await super().GetServerInfo(request, context)
            info.protocol_version += 1
            return info

    await fakes.worker(Newer("t", fakes.tokenizer))
    directory = await introduced(fakes)
    assert "t: it speaks protocol version" in directory.why_no_target()
    assert not directory.seen


async def test_no_request_begins_at_a_target_that_is_about_to_be_forgotten(
    fakes: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the connection of another one was closed, it was still chosen, and then lost its own."""
    directory = await introduced(fakes, "a", "b")
    usable: list[int] = []

    async def close(self: TargetClient) -> None:
        usable.append(len(directory.targets))

    monkeypatch.setattr(TargetClient, "close", close)
    for target in directory.targets:
        target.num_missing = MOST_MISSING
    directory.registry.workers.return_value = []
    await directory.refresh()
    assert usable == [0, 0]


async def test_threads_end_even_if_a_connection_cannot_be_closed(fakes: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = await introduced(fakes, "a", "b")
    closed: list[str] = []

    async def close(self: TargetClient) -> None:
        closed.append(self.address)
        raise OSError("closed already")

    monkeypatch.setattr(TargetClient, "close", close)
    with pytest.raises(OSError, match="closed already"):
        async with directory.running():
            pass
    assert len(closed) == 2
    with pytest.raises(RuntimeError, match="after shutdown"):
        await directory.tokenizing.run(lambda: None)


async def test_no_session_begins_at_a_draining_draft_worker_while_there_is_another(fakes: Fleet) -> None:
    """It refuses new sessions, and had the fewest: each began with a round without guesses."""
    for name in ("a", "b"):
        await fakes.worker(FakeDraft(name, fakes.tokenizer))
    directory = await introduced(fakes, "t")
    (target,) = directory.targets
    busy, leaving = (directory.find(name) for name in ("a", "b"))
    busy.num_running, leaving.num_missing = 5, 2
    assert directory.draft(target, "new", "") is busy
    assert directory.draft(target, "old", "b") is leaving, "with the session's KV, for as long as it answers"
    busy.problem = "gone"
    assert directory.draft(target, "new", "") is leaving


RECORD = WorkerRecord("target", "t", "10.0.0.1:7413")


class Clock:
    """A clock that only the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def attempts(unreached: UnreachedWorkers, clock: Clock, seconds: float) -> list[float]:
    """When a worker that never answers is tried, by an orchestrator that polls."""
    found, end = [], clock.now + seconds
    while clock.now < end:
        if unreached.may_try(RECORD):
            found.append(clock.now)
            unreached.failed(RECORD, Unavailable("it does not answer"))
        clock.now += POLL_SECONDS
    return found


def test_an_unusable_worker_is_retried_and_logged_ever_more_seldom(caplog: pytest.LogCaptureFixture) -> None:
    """It was tried at each poll forever, with a line in the log each time."""
    clock, hour = Clock(), 3600.0
    found = attempts(UnreachedWorkers(clock), clock, hour)
    assert found[:2] == [0.0, POLL_SECONDS], "one that has just started is soon there"
    pauses = [after - before for before, after in pairwise(found)]
    assert max(pauses) <= LONGEST_PAUSE_SECONDS + POLL_SECONDS
    assert min(pauses[10:]) >= LONGEST_PAUSE_SECONDS / 2
    assert len(set(pauses[10:])) > 1, "orchestrators that failed together do not try together"
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "t is registered at 10.0.0.1:7413, but cannot be used (attempt 1): it does not answer"
    assert len(lines) <= 1 + hour / REMIND_SECONDS


def test_a_new_record_of_an_unusable_worker_is_tried_at_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    unreached = UnreachedWorkers(clock)
    attempts(unreached, clock, 60.0)
    unreached.failed(RECORD, Unavailable("it does not answer"))
    assert not unreached.may_try(replace(RECORD, load=WorkerLoad(2, 1))), "its load is no news"
    assert unreached.may_try(replace(RECORD, address="10.0.0.2:7413"))
    unreached.keep_listed([RECORD])
    assert unreached.problems("target") == {"t": "it does not answer"}
    assert unreached.problems("draft") == {}
    assert not unreached.may_try(RECORD)
    for is_new in (lambda: unreached.keep_listed([]), lambda: unreached.met(RECORD)):
        is_new()
        assert unreached.may_try(RECORD)
        assert unreached.problems("target") == {}
        caplog.clear()
        unreached.failed(RECORD, Unavailable("it does not answer"))
        assert "(attempt 1)" in caplog.text
        assert not unreached.may_try(RECORD)


def test_an_internal_error_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    unreached = UnreachedWorkers(Clock())
    for _ in range(2):
        unreached.failed(RECORD, ZeroDivisionError())
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert unreached.problems("target") == {"t": "ZeroDivisionError"}


async def test_a_worker_is_used_once_it_answers_and_errors_explain_why_it_is_not(fakes: Fleet) -> None:
    """Between two attempts the error said that no target was registered."""
    is_well = False

    class Late(FakeTarget):
        async def GetServerInfo(self, request: object, context: object) -> object:
            if not is_well:
                raise Unavailable("it is still loading")
            return await super().GetServerInfo(request, context)

    await fakes.worker(Late("late", fakes.tokenizer))
    directory = Directory(fakes.registry)
    problem = "late: it did not report what it serves: it is still loading"
    async with directory.running(poll_seconds=0.02):
        await until(lambda: problem in directory.why_no_target())
        (sentence,) = directory.unreached()
        assert re.fullmatch(r"late is registered at 127\.0\.0\.1:\d+, but cannot be used: .* still loading", sentence)
        assert sentence in find_problems(ServerInfo((), "", "", 1, __version__, unreached=directory.unreached()))
        is_well = True
        await until(lambda: directory.has_target)
        assert problem not in directory.why_no_target()
        assert directory.unreached() == ()


async def test_a_single_caller_does_not_wait() -> None:
    """With few streams the limiter must cost nothing, not even one iteration of the event loop."""
    limiter, is_next_iteration = IterationLimiter(2), asyncio.Event()
    asyncio.get_running_loop().call_soon(is_next_iteration.set)
    await limiter.acquire()
    await limiter.acquire()
    assert not is_next_iteration.is_set()


async def test_a_burst_is_let_through_in_order_a_few_at_a_time() -> None:
    """Fifty rounds whose verdicts come together must not hold up the event loop until the last of them is done."""
    limiter, loop = IterationLimiter(3), asyncio.get_running_loop()
    iteration, passed = 0, list[tuple[int, int]]()

    def count() -> None:
        nonlocal iteration
        iteration += 1
        if len(passed) < 50:
            loop.call_soon(count)

    async def come(number: int) -> None:
        await limiter.acquire()
        passed.append((number, iteration))

    loop.call_soon(count)
    await asyncio.gather(*map(come, range(50)))
    assert [number for number, _ in passed] == list(range(50))
    assert max(Counter(when for _, when in passed).values()) == 3
    assert passed[-1][1] - passed[0][1] >= 16


async def test_a_cancelled_waiter_takes_no_others_turn() -> None:
    """Clients that hang up in a burst leave their turns to the others."""
    limiter = IterationLimiter(1)
    tasks = [asyncio.create_task(limiter.acquire()) for _ in range(5)]
    await asyncio.sleep(0)
    for task in tasks[1:4]:
        task.cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(tasks[0], tasks[4])
    for task in tasks[1:4]:
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
    await limiter.acquire()
