"""When a sweep waits for sessions that draft, on a clock that is turned by hand."""

from __future__ import annotations

import pytest

from target_worker.scheduler.batch_delay import BatchDelay

HERE = {"": 1}  # one call waits, of a caller that does not say how many sessions it runs


def after_some_rounds(max_delay: float, away: float, sweep: float = 10.0) -> BatchDelay:
    """A cohort of two whose drafting takes `away`."""
    batch_delay = BatchDelay(max_delay)
    for number in range(20):
        now = 100.0 * number
        batch_delay.swept(sweep)
        for who in ("a", "b"):
            batch_delay.answered(who, now)
        for who in ("a", "b"):
            batch_delay.arrived(who, now + away)
    batch_delay.swept(sweep)
    for who in ("a", "b"):
        batch_delay.answered(who, 5000.0)
    return batch_delay


def test_a_recently_answered_session_is_waited_for() -> None:
    batch_delay = after_some_rounds(0.5, away=1.0)
    batch_delay.arrived("a", 5000.9)
    assert batch_delay.seconds(5000.9, HERE) == pytest.approx(3 * 1.0 - 0.9, abs=0.1)
    batch_delay.arrived("b", 5001.1)
    assert batch_delay.seconds(5001.1, HERE) == 0.0, "all are there"


@pytest.mark.parametrize(
    ("max_delay", "away", "now", "expected"),
    [
        (0.25, 2.0, 5000.0, 2.5),
        (0.5, 2.0, 5005.1, 0.0),  # they are late
        (0.5, 6.0, 5000.0, 0.0),  # drafting takes longer than the longest delay
        (0.0, 0.1, 5000.0, 0.0),
    ],
)
def test_a_wait_is_no_longer_than_its_gain(max_delay: float, away: float, now: float, expected: float) -> None:
    assert after_some_rounds(max_delay, away).seconds(now, HERE) == pytest.approx(expected)


def test_a_wait_is_no_longer_if_a_sweep_in_flight_ends_meanwhile() -> None:
    batch_delay = after_some_rounds(0.25, away=2.0)
    assert batch_delay.seconds(5000.0, HERE) == 2.5
    batch_delay.swept(10.0)
    batch_delay.answered("c", 5002.0)
    assert batch_delay.seconds(5002.0, HERE) == 0.5


def test_a_session_that_left_is_not_waited_for() -> None:
    batch_delay = after_some_rounds(0.5, away=2.0)
    batch_delay.left("a")
    batch_delay.arrived("b", 5000.5)
    assert batch_delay.seconds(5000.5, HERE) == 0.0


def test_a_user_who_pauses_for_minutes_does_not_end_waiting_for_others() -> None:
    batch_delay = after_some_rounds(0.5, away=2.0)
    batch_delay.arrived("a", 9000.0)
    batch_delay.answered("b", 9000.0)
    assert batch_delay.seconds(9000.0, HERE) > 0.0


def test_sessions_that_never_return_are_forgotten() -> None:
    batch_delay = after_some_rounds(0.5, away=2.0)
    for number in range(1000):
        batch_delay.answered(f"s{number}", 6000.0)
    batch_delay.seconds(7000.0, HERE)
    assert not batch_delay._answered


def told(batch_delay: BatchDelay, who: str, when: float, num_running: int) -> None:
    batch_delay.arrived(who, when, "o", num_running)


def rounds_of(caller: str, num_running: int, away: float = 1.0, sweep: float = 10.0) -> BatchDelay:
    """As `after_some_rounds`, of a caller that says how many sessions it runs; answered at 5000."""
    batch_delay = BatchDelay(1.0)
    batch_delay.swept(sweep)
    for number in range(50):
        for who in range(num_running):
            batch_delay.arrived(str(who), 100.0 * number + away, caller, num_running)
        for who in range(num_running):
            batch_delay.answered(str(who), 100.0 * (number + 1), caller)
    return batch_delay


def test_an_ended_session_is_not_waited_for() -> None:
    batch_delay = rounds_of("o", 3)
    told(batch_delay, "0", 5000.5, num_running=2)
    assert batch_delay.seconds(5000.5, {"o": 1}) > 0.0, "one more of two is drafting"
    told(batch_delay, "1", 5000.6, num_running=2)
    assert batch_delay.seconds(5000.6, {"o": 2}) == 0.0, "the third has ended"


def test_a_new_session_is_waited_for_once() -> None:
    batch_delay = rounds_of("o", 1)
    told(batch_delay, "0", 5001.0, num_running=3)
    assert batch_delay.seconds(5001.0, {"o": 1}) == pytest.approx(3.0), "as long as drafting typically takes, and slack"
    told(batch_delay, "1", 5002.0, num_running=3)
    assert batch_delay.seconds(5002.0, {"o": 2}) > 0.0
    assert batch_delay.seconds(5005.0, {"o": 2}) == 0.0, "the other one takes longer"
    batch_delay.begins()
    batch_delay.swept(10.0)
    for who in ("0", "1"):
        batch_delay.answered(who, 5020.0, "o")
    for number, who in enumerate(("0", "1"), 1):
        told(batch_delay, who, 5021.0, num_running=3)
        waits = batch_delay.seconds(5021.0, {"o": number}) > 0.0
        assert waits == (number == 1), "and is not waited for again"


def test_starts_longer_than_a_sweep_are_not_waited_for() -> None:
    batch_delay = rounds_of("o", 1)
    for number in range(20):
        begun = 6000.0 + 100 * number
        told(batch_delay, "0", begun, num_running=2)
        batch_delay.seconds(begun, {"o": 1})
        told(batch_delay, f"new {number}", begun + 15.0, num_running=2)
        batch_delay.answered("0", begun + 40.0, "o")
        batch_delay.left(f"new {number}")
    told(batch_delay, "0", 9000.0, num_running=2)
    assert batch_delay.seconds(9000.0, {"o": 1}) == 0.0


def test_callers_are_expected_by_their_own_reports() -> None:
    batch_delay = rounds_of("o", 1)
    told(batch_delay, "0", 5001.0, num_running=1)
    batch_delay.arrived("x", 5001.0, "p", 2)
    assert batch_delay.seconds(5001.0, {"o": 1, "p": 1}) > 0.0
    batch_delay.arrived("y", 5001.2, "p", 2)
    assert batch_delay.seconds(5001.2, {"o": 1, "p": 2}) == 0.0


def test_callers_that_are_gone_are_forgotten() -> None:
    batch_delay = rounds_of("o", 1)
    for number in range(1000):
        batch_delay.arrived("x", 6000.0, f"p{number}", 2)
    batch_delay.seconds(9000.0, {"o": 1})
    assert len(batch_delay._callers) <= 1


def test_waiting_is_limited_however_many_sessions_begin_in_turn() -> None:
    batch_delay = rounds_of("o", 1)
    now = 5001.0
    told(batch_delay, "0", now, num_running=2)
    waited = 0.0
    for number in range(1, 100):
        if batch_delay.seconds(now, {"o": number}) == 0.0:
            break
        waited, now = waited + 0.9, now + 0.9
        told(batch_delay, f"new {number}", now, num_running=number + 2)
    assert waited <= 10.0 + 0.9, "no longer than a sweep"


def test_a_session_that_arrives_during_the_sweep_of_its_report_is_not_counted_as_early() -> None:
    batch_delay = rounds_of("o", 1)
    told(batch_delay, "0", 5003.0, num_running=2)
    batch_delay.answered("0", 5012.0, "o")
    told(batch_delay, "0", 5013.0, num_running=2)
    batch_delay.seconds(5013.0, {"o": 1})
    batch_delay.arrived("new", 5012.5, "o", 2)  # it had been in the command
    assert batch_delay._beginning.seconds == 0.0
