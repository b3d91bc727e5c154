"""When a sweep waits for sessions that draft, on a clock that is turned by hand."""

from __future__ import annotations

import pytest

from target_worker.gathering import Gathering


def after_some_rounds(patience: float, away: float, sweep: float = 10.0) -> Gathering:
    """A cohort of two whose drafting takes `away`."""
    gathering = Gathering(patience)
    for number in range(20):
        now = 100.0 * number
        gathering.swept(sweep)
        for who in ("a", "b"):
            gathering.answered(who, now)
        for who in ("a", "b"):
            gathering.arrived(who, now + away)
    gathering.swept(sweep)
    for who in ("a", "b"):
        gathering.answered(who, 5000.0)
    return gathering


def test_who_was_answered_moments_ago_is_waited_for() -> None:
    gathering = after_some_rounds(0.5, away=1.0)
    gathering.arrived("a", 5000.9)
    assert gathering.seconds(5000.9) == pytest.approx(3 * 1.0 - 0.9, abs=0.1)
    gathering.arrived("b", 5001.1)
    assert gathering.seconds(5001.1) == 0.0, "all are there"


def test_nobody_is_waited_for_longer_than_it_is_worth() -> None:
    assert after_some_rounds(0.25, away=2.0).seconds(5000.0) == pytest.approx(2.5)
    assert after_some_rounds(0.5, away=2.0).seconds(5005.1) == 0.0, "they are late"


def test_nobody_is_waited_for_where_drafting_takes_longer_than_patience() -> None:
    assert after_some_rounds(0.5, away=6.0).seconds(5000.0) == 0.0


def test_without_patience_there_is_no_wait() -> None:
    assert after_some_rounds(0.0, away=0.1).seconds(5000.0) == 0.0


def test_who_has_left_is_not_waited_for() -> None:
    gathering = after_some_rounds(0.5, away=2.0)
    gathering.left("a")
    gathering.arrived("b", 5000.5)
    assert gathering.seconds(5000.5) == 0.0


def test_a_user_who_thinks_for_minutes_does_not_end_the_waiting_for_others() -> None:
    gathering = after_some_rounds(0.5, away=2.0)
    gathering.arrived("a", 9000.0)
    gathering.answered("b", 9000.0)
    assert gathering.seconds(9000.0) > 0.0


def test_sessions_that_never_come_back_are_forgotten() -> None:
    gathering = after_some_rounds(0.5, away=2.0)
    for number in range(1000):
        gathering.answered(f"s{number}", 6000.0)
    gathering.seconds(7000.0)
    assert not gathering._answered
