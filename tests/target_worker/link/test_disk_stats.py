"""What crosses the link is counted once, however many read, and its best speed is not taken over too little."""

from __future__ import annotations

import time

from target_worker.link.link_stats import BestSpeed, DiskStats, LinkFigures


def test_time_in_which_two_read_counts_once() -> None:
    traffic, began = DiskStats(), time.perf_counter_ns()
    with traffic.reading(7):
        with traffic.reading(5):
            time.sleep(0.02)
        under_way = traffic.figures(0)
        assert under_way.num_bytes == 5
        assert 20_000_000 <= under_way.busy_ns <= time.perf_counter_ns() - began
    ended, elapsed = traffic.figures(3), time.perf_counter_ns() - began
    assert (ended.num_bytes, ended.wait_ns) == (12, 3)
    assert ended.busy_ns <= elapsed
    time.sleep(0.01)
    assert traffic.figures(3) == ended


def test_a_few_bytes_that_end_at_once_are_no_speed_of_a_link() -> None:
    """100 bytes in 100 ns, then 50 that had begun long before; the best counts over 100 bytes and more."""
    best = BestSpeed(LinkFigures(0, 0, 0), least_bytes=100)
    assert best.seen(LinkFigures(0, 0, 0)) == 0
    assert best.seen(LinkFigures(50, 100, 0)) == 0.5  # as far as it is known
    assert best.seen(LinkFigures(100, 100, 0)) == 1.0
    assert best.seen(LinkFigures(150, 101, 0)) == 1.0
    assert best.seen(LinkFigures(300, 200, 0)) == 2.0
    assert best.seen(LinkFigures(400, 400, 0)) == 2.0
