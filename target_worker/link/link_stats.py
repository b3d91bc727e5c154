"""Counters of a link, from disk or to a device: bytes that crossed it, its busy time, waits, and its best speed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from bough.protocol.messages import Timings
from target_worker.link.streams import Copy, DeviceEvent

NS_PER_MS = 1_000_000


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

    def figures(self, wait_ns: int) -> Timings:
        """The counters so far, reads in flight included, with the sweeps' waiting time."""
        with self._lock:
            since_ns = time.perf_counter_ns() - self._busy_since_ns if self._num_in_flight else 0
            return Timings(wait_ns=wait_ns, link_ns=self._busy_ns + since_ns, link_bytes=self._num_bytes)


class BestSpeed:
    """The best speed that a link has reached over at least `least_bytes` bytes.

    Bytes count when a read ends, but time as it passes: over few bytes, reads begun earlier would distort the speed.
    """

    def __init__(self, since: Timings, least_bytes: int) -> None:
        self._since = since
        self._least_bytes = least_bytes
        self._best = 0.0

    def seen(self, figures: Timings) -> float:
        """Best speed in bytes per nanosecond, including `figures`; 0 before the first read."""
        num_bytes, busy_ns = figures.link_bytes - self._since.link_bytes, figures.link_ns - self._since.link_ns
        speed = num_bytes / busy_ns if busy_ns else 0.0
        if num_bytes < self._least_bytes:
            return self._best or speed
        self._since, self._best = figures, max(self._best, speed)
        return self._best


class _Span(NamedTuple):
    """The time between two events, readable when both are reached."""

    begin: DeviceEvent
    end: DeviceEvent
    num_bytes: int


class CopyStats:
    """Counters that any thread may add to. All copies are in one stream: their times do not overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: deque[_Span] = deque()
        self._waits: deque[_Span] = deque()
        self._num_bytes = self._busy_ns = self._wait_ns = 0

    def copied(self, copy: Copy, num_bytes: int) -> None:
        """Count a queued copy."""
        with self._lock:
            self._copies.append(_Span(copy.begun, copy.done, num_bytes))

    def waited(self, ready: DeviceEvent, went_on: DeviceEvent) -> None:
        """Count the time between two events of the compute stream as a wait for copies."""
        with self._lock:
            self._waits.append(_Span(ready, went_on, 0))

    @property
    def outstanding_bytes(self) -> int:
        """Bytes of queued copies that have not ended."""
        with self._lock:
            self._count()
            return sum(span.num_bytes for span in self._copies)

    def figures(self) -> Timings:
        """Counters since the start; queued copies count when they end."""
        with self._lock:
            self._count()
            return Timings(wait_ns=self._wait_ns, link_ns=self._busy_ns, link_bytes=self._num_bytes)

    def _count(self) -> None:
        for span in _reached(self._copies):
            self._num_bytes += span.num_bytes
            self._busy_ns += _nanoseconds(span)
        self._wait_ns += sum(map(_nanoseconds, _reached(self._waits)))


def _reached(spans: deque[_Span]) -> Iterator[_Span]:
    """Remove and yield the spans that have ended."""
    while spans and spans[0].end.query():
        yield spans.popleft()


def _nanoseconds(span: _Span) -> int:
    return int(span.begin.elapsed_time(span.end) * NS_PER_MS)
