"""Counters of a link: bytes read, and the time with at least one read in flight."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from bough.model.cpu.atomics import APART, hold, let_go
from bough.model.cpu.jit import strict, strict_inner

NUM_BYTES, IN_FLIGHT, BUSY_NS, BUSY_SINCE_NS = range(4)
_CLOCK_MONOTONIC = 1  # which time.perf_counter_ns reads
_clock_gettime: Any = types.ExternalFunction("clock_gettime", types.intc(types.intc, types.uintp))


class DiskStats(NamedTuple):
    """Counters of all readers of one link, changed under the lock."""

    lock: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def none_yet(cls) -> DiskStats:
        """Counters before the first read."""
        return cls(np.zeros(2 * APART, np.int64), np.zeros(4, np.int64))


@strict_inner
def _now() -> Any:
    time = np.empty(2, np.int64)  # seconds, nanoseconds
    _clock_gettime(_CLOCK_MONOTONIC, time.ctypes.data)
    return time[0] * 1_000_000_000 + time[1]


@strict
def read_begins(traffic: Any) -> Any:
    """Count the start of a read."""
    hold(traffic.lock)
    traffic.counts[IN_FLIGHT] += 1
    if traffic.counts[IN_FLIGHT] == 1:
        traffic.counts[BUSY_SINCE_NS] = _now()
    let_go(traffic.lock)


@strict
def read_ends(traffic: Any, num_bytes: Any) -> Any:
    """Count the end of a read, successful or not."""
    hold(traffic.lock)
    traffic.counts[NUM_BYTES] += num_bytes
    traffic.counts[IN_FLIGHT] -= 1
    if traffic.counts[IN_FLIGHT] == 0:
        traffic.counts[BUSY_NS] += _now() - traffic.counts[BUSY_SINCE_NS]
    let_go(traffic.lock)


@strict
def bytes_and_busy_ns(traffic: Any) -> Any:
    """Bytes read so far, and the time with at least one read in flight."""
    hold(traffic.lock)
    num_bytes, busy_ns = traffic.counts[NUM_BYTES], traffic.counts[BUSY_NS]
    if traffic.counts[IN_FLIGHT]:
        busy_ns += _now() - traffic.counts[BUSY_SINCE_NS]
    let_go(traffic.lock)
    return num_bytes, busy_ns
