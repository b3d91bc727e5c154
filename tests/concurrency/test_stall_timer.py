"""When a worker stalls, and when it is only idle or slow."""

from __future__ import annotations

from bough.concurrency.stall_timer import StallTimer


def test_calls_waiting_without_a_finished_sweep_are_a_stall() -> None:
    stall = StallTimer()
    assert stall.seconds(True, 7, now=100) == 0
    assert stall.seconds(True, 7, now=109) == 9
    assert stall.seconds(True, 7, now=110) == 10, "a sweep that never ends is one"


def test_a_finished_sweep_restarts_the_stall_timer() -> None:
    stall = StallTimer()
    assert stall.seconds(True, 7, now=100) == 0
    assert stall.seconds(True, 8, now=109) == 0
    assert stall.seconds(True, 8, now=118) == 9
    assert stall.seconds(True, 8, now=119) == 10


def test_an_idle_worker_does_not_stall() -> None:
    stall = StallTimer()
    for now in (100, 200, 300):
        assert stall.seconds(False, 7, now=now) == 0
    assert stall.seconds(True, 7, now=301) == 0, "it is busy from now on, not since it was idle"
    assert stall.seconds(True, 7, now=310) == 9
    assert stall.seconds(True, 7, now=311) == 10
