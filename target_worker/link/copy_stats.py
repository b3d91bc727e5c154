"""Counts bytes copied to a device, and the time that its compute stream waited for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from target_worker.link.disk_stats import LinkFigures
from target_worker.link.streams import Copy, DeviceEvent

NS_PER_MS = 1_000_000


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

    def figures(self) -> LinkFigures:
        """Counters since the start; queued copies count when they end."""
        with self._lock:
            self._count()
            return LinkFigures(self._num_bytes, self._busy_ns, self._wait_ns)

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
