"""What crosses the link is counted once, however many read, and its best speed is not taken over too little."""

from __future__ import annotations

import time

from bough.protocol.messages import Timings
from target_worker.link.link_stats import BestSpeed, DiskStats


def test_time_in_which_two_read_counts_once() -> None:
    traffic, began = DiskStats(), time.perf_counter_ns()
    with traffic.reading(7):
        with traffic.reading(5):
            time.sleep(0.02)
        under_way = traffic.figures(0)
        assert under_way.link_bytes == 5
        assert 20_000_000 <= under_way.link_ns <= time.perf_counter_ns() - began
    ended, elapsed = traffic.figures(3), time.perf_counter_ns() - began
    assert (ended.link_bytes, ended.wait_ns) == (12, 3)
    assert ended.link_ns <= elapsed
    time.sleep(0.01)
    assert traffic.figures(3) == ended


def test_a_few_bytes_that_end_at_once_are_no_speed_of_a_link() -> None:
    """100 bytes in 100 ns, then 50 that had begun long before; the best counts over 100 bytes and more."""
    best = BestSpeed(Timings(link_bytes=0, link_ns=0), least_bytes=100)
    assert best.seen(Timings(link_bytes=0, link_ns=0)) == 0
    assert best.seen(Timings(link_bytes=50, link_ns=100)) == 0.5  # as far as it is known
    assert best.seen(Timings(link_bytes=100, link_ns=100)) == 1.0
    assert best.seen(Timings(link_bytes=150, link_ns=101)) == 1.0
    assert best.seen(Timings(link_bytes=300, link_ns=200)) == 2.0
    assert best.seen(Timings(link_bytes=400, link_ns=400)) == 2.0
