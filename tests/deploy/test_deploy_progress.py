"""When a worker stalls, and when it is only idle or slow."""

from __future__ import annotations

from bough.protocol.messages import WorkerInfo
from deploy.progress import Progress


def info(num_passes: int, num_waiting: int = 0, num_running: int = 0) -> WorkerInfo:
    return WorkerInfo(
        "target", "t", "m", "d", "f", "t", 262, 64, 8, 1,
        num_passes=num_passes, num_waiting=num_waiting, num_running=num_running,
    )  # fmt: skip


def test_calls_that_wait_while_no_sweep_ends_are_a_stall() -> None:
    progress = Progress()
    assert progress.stalled_seconds(info(7, num_waiting=1), now=100) == 0
    assert progress.stalled_seconds(info(7, num_waiting=3), now=109) == 9
    assert progress.stalled_seconds(info(7, num_running=1), now=110) == 10, "a sweep that never ends is one"


def test_a_sweep_that_ends_begins_the_wait_anew() -> None:
    progress = Progress()
    assert progress.stalled_seconds(info(7, num_waiting=1), now=100) == 0
    assert progress.stalled_seconds(info(8, num_waiting=1), now=109) == 0
    assert progress.stalled_seconds(info(8, num_waiting=1), now=118) == 9
    assert progress.stalled_seconds(info(8, num_waiting=1), now=119) == 10


def test_who_has_nothing_to_do_does_not_stall() -> None:
    progress = Progress()
    for now in (100, 200, 300):
        assert progress.stalled_seconds(info(7), now=now) == 0
    assert progress.stalled_seconds(info(7, num_running=1), now=301) == 0, (
        "it is busy from now on, not since it was idle"
    )
    assert progress.stalled_seconds(info(7, num_running=1), now=310) == 9
    assert progress.stalled_seconds(info(7, num_running=1), now=311) == 10
