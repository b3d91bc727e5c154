"""How long a worker is left alone after faults, and by whom."""

from __future__ import annotations

import time

import pytest

from orchestrator.health import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, MAX_SESSIONS, Health


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a test turns."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def test_calls_that_one_incident_cuts_off_are_one_fault(now: list[float]) -> None:
    """Six sessions on a target whose connection was reset once kept it out of use for half a minute."""
    health = Health()
    for _ in range(6):
        health.lost()
    assert not health.is_good
    now[0] += FIRST_PAUSE_SECONDS
    assert health.is_good


def test_each_fault_after_a_pause_doubles_the_next(now: list[float]) -> None:
    health, pauses = Health(), []
    for _ in range(7):
        health.lost()
        began = now[0]
        while not health.is_good:
            now[0] += 0.5
        pauses.append(now[0] - began)
    assert pauses == [1, 2, 4, 8, 16, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS]
    health.succeeded("s")
    health.lost()
    now[0] += FIRST_PAUSE_SECONDS
    assert health.is_good


def test_a_success_ends_a_pause(now: list[float]) -> None:
    health = Health()
    health.lost()
    assert not health.is_good
    health.succeeded("s")
    assert health.is_good


def test_one_session_that_fails_takes_a_worker_from_itself_alone(now: list[float]) -> None:
    health = Health()
    for _ in range(5):
        health.failed("bad")
        assert health.is_good
        assert health.is_good_for("good")
        assert not health.is_good_for("bad")
        now[0] += LONGEST_PAUSE_SECONDS
        assert health.is_good_for("bad")


def test_sessions_that_all_fail_take_it_from_everyone(now: list[float]) -> None:
    health = Health()
    health.failed("one")
    health.failed("two")
    assert not health.is_good
    assert not health.is_good_for("three")


def test_failures_with_a_success_between_are_the_sessions_own(now: list[float]) -> None:
    health = Health()
    for session in ("one", "two", "three"):
        health.failed(session)
        health.succeeded("good")
        assert health.is_good
        assert not health.is_good_for(session)


def test_what_is_remembered_is_bounded(now: list[float]) -> None:
    health = Health()
    for number in range(3 * MAX_SESSIONS):
        health.failed(f"{number}")
        health.succeeded("good")
    assert len(health._pauses) == MAX_SESSIONS
