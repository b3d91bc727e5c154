"""Counters of a link: bytes that crossed it, the time in which it was busy, and the best speed it has shown."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """Counters of the link since the start."""

    num_bytes: int  # read
    busy_ns: int  # with at least one read in flight
    wait_ns: int  # that sweeps waited for layers


class DiskStats:
    """Counters of all readers of one disk; any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes = self._num_in_flight = self._busy_ns = self._busy_since_ns = 0

    @contextmanager
    def reading(self, num_bytes: int) -> Iterator[None]:
        """Count a read, successful or not."""
        with self._lock:
            if not self._num_in_flight:
                self._busy_since_ns = time.perf_counter_ns()
            self._num_in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_bytes += num_bytes
                self._num_in_flight -= 1
                if not self._num_in_flight:
                    self._busy_ns += time.perf_counter_ns() - self._busy_since_ns

    def figures(self, wait_ns: int) -> LinkFigures:
        """The counters so far, reads in flight included, with the sweeps' waiting time."""
        with self._lock:
            since_ns = time.perf_counter_ns() - self._busy_since_ns if self._num_in_flight else 0
            return LinkFigures(self._num_bytes, self._busy_ns + since_ns, wait_ns)


class BestSpeed:
    """The best speed that a link has reached over at least `least_bytes` bytes.

    Bytes count when a read ends, but time as it passes: over few bytes, reads begun earlier would distort the speed.
    """

    def __init__(self, since: LinkFigures, least_bytes: int) -> None:
        self._since = since
        self._least_bytes = least_bytes
        self._best = 0.0

    def seen(self, figures: LinkFigures) -> float:
        """Best speed in bytes per nanosecond, including `figures`; 0 before the first read."""
        num_bytes, busy_ns = figures.num_bytes - self._since.num_bytes, figures.busy_ns - self._since.busy_ns
        speed = num_bytes / busy_ns if busy_ns else 0.0
        if num_bytes < self._least_bytes:
            return self._best or speed
        self._since, self._best = figures, max(self._best, speed)
        return self._best
