"""Listed workers that cannot be met: how often they are tried, and what the log and errors say of them."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise

import pytest

from bough.errors import Unavailable
from bough.registry.records import WorkerLoad, WorkerRecord
from orchestrator.cluster import directory as module
from orchestrator.cluster.directory import LONGEST_PAUSE_SECONDS, POLL_SECONDS, REMIND_SECONDS, Directory, UnmetWorkers
from tests.fakes.fleet import FakeTarget, Fleet
from tests.fakes.waiting import until

RECORD = WorkerRecord("target", "t", "10.0.0.1:7413")


class Clock:
    """Stands still but when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def attempts(unmet: UnmetWorkers, clock: Clock, seconds: float) -> list[float]:
    """When a worker that never answers is tried, by an orchestrator that polls."""
    found, end = [], clock.now + seconds
    while clock.now < end:
        if unmet.may_try(RECORD):
            found.append(clock.now)
            unmet.failed(RECORD, Unavailable("it does not answer"))
        clock.now += POLL_SECONDS
    return found


def test_it_is_tried_ever_more_seldom_and_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """It was tried at each poll for ever, with a line in the log each time."""
    clock, hour = Clock(), 3600.0
    found = attempts(UnmetWorkers(clock), clock, hour)
    assert found[:2] == [0.0, POLL_SECONDS], "one that has just started is soon there"
    pauses = [after - before for before, after in pairwise(found)]
    assert max(pauses) <= LONGEST_PAUSE_SECONDS + POLL_SECONDS
    assert min(pauses[10:]) >= LONGEST_PAUSE_SECONDS / 2
    assert len(set(pauses[10:])) > 1, "orchestrators that failed together do not try together"
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "t is registered at 10.0.0.1:7413, but could not be met (attempt 1): it does not answer"
    assert len(lines) <= 1 + hour / REMIND_SECONDS


def test_what_the_index_says_anew_of_it_is_tried_at_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    unmet = UnmetWorkers(clock)
    attempts(unmet, clock, 60.0)
    unmet.failed(RECORD, Unavailable("it does not answer"))
    assert not unmet.may_try(replace(RECORD, load=WorkerLoad(2, 1))), "its load is no news"
    assert unmet.may_try(replace(RECORD, address="10.0.0.2:7413"))
    unmet.keep_listed([RECORD])
    assert unmet.problems("target") == {"t": "it does not answer"}
    assert unmet.problems("draft") == {}
    assert not unmet.may_try(RECORD)
    for is_new in (lambda: unmet.keep_listed([]), lambda: unmet.met(RECORD)):
        is_new()
        assert unmet.may_try(RECORD)
        assert unmet.problems("target") == {}
        caplog.clear()
        unmet.failed(RECORD, Unavailable("it does not answer"))
        assert "(attempt 1)" in caplog.text
        assert not unmet.may_try(RECORD)


def test_a_fault_of_ours_is_logged_with_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    unmet = UnmetWorkers(Clock())
    for _ in range(2):
        unmet.failed(RECORD, ZeroDivisionError())
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert unmet.problems("target") == {"t": "ZeroDivisionError"}


async def test_it_is_used_once_it_answers_and_errors_say_why_it_is_not(
    fakes: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two attempts the error said that no target was registered."""
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    is_well = False

    class Late(FakeTarget):
        async def GetServerInfo(self, request: object, context: object) -> object:
            if not is_well:
                raise Unavailable("it is still loading")
            return await super().GetServerInfo(request, context)

    await fakes.worker(Late("late", fakes.tokenizer))
    directory = Directory(fakes.registry)
    async with directory.running():
        await until(lambda: not directory._meetings)
        assert "late: it does not tell what it serves: it is still loading" in directory.why_no_target()
        is_well = True
        await until(lambda: directory.has_target)
        assert directory._unmet.problems("target") == {}
