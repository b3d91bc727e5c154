"""Compiled loop of the threads that read layers; it runs without the GIL.

With few processors a thread that holds the GIL is often preempted by one that computes. A sweep needs the GIL between
layers and would wait for it, so successful reads never take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from bough.model.cpu.atomics import APART, hold, let_go
from bough.model.cpu.jit import strict, strict_inner
from target_worker.link.disk_stats import DiskStats, read_begins, read_ends

Ints = NDArray[np.int64]
CLOSED = -1  # instead of a read's number

# What `Link.counts` counts.
ISSUED, CONSUMED, IN_FLIGHT, IS_STOPPED, IS_CLOSED = range(5)
_pread: Any = types.ExternalFunction("pread", types.int64(types.intc, types.uintp, types.uintp, types.int64))
_read: Any = types.ExternalFunction("read", types.int64(types.intc, types.uintp, types.uintp))
_write: Any = types.ExternalFunction("write", types.int64(types.intc, types.uintp, types.uintp))


class Read(NamedTuple):
    """One read of a round over all layers."""

    layer: int
    descriptor: int
    offset: int  # in the file
    num_bytes: int
    needed: int  # bytes that must exist: the last read of a file may extend beyond its end
    begin: int  # in the layer's slab


class Link(NamedTuple):
    """State shared by the reading threads and the consumer of layers.

    All mutable state is under the lock, except `IS_CLOSED`, which is set before the last bytes are written to `room`.

    Read n is read n % num_reads of its round; layer s (as in `CONSUMED`) is layer s % num_layers, in slab s %
    num_slabs.
    """

    lock: Ints
    counts: Ints
    missing: Ints  # (num_slabs,) reads outstanding for the layer that each slab holds, or will hold next
    reads: Ints  # (num_reads, 6) `Read`
    num_reads: Ints  # (num_layers,) of each layer
    memory: int  # address of the first slab
    slab_bytes: int
    room: int  # pipe with a byte for each read that may begin: a byte wakes one thread, an eventfd all
    arrived: int  # eventfd raised when a layer has arrived, and when no read is in flight any more
    one: Ints  # the value 1 written to `arrived`; kept here since compiled code may free a local array too early
    traffic: DiskStats  # shared by all readers of the link

    @classmethod
    def of(
        cls,
        reads: Sequence[Read],
        num_slabs: int,
        memory: int,
        slab_bytes: int,
        room: int,
        arrived: int,
        traffic: DiskStats,
    ) -> Link:
        """Build the state for the reads of all layers, in order."""
        lock, counts, missing = (np.zeros(size, np.int64) for size in (2 * APART, 5, num_slabs))
        numbers, num_reads = np.array(reads, np.int64), np.bincount([read.layer for read in reads]).astype(np.int64)
        one = np.ones(1, np.int64)
        return cls(lock, counts, missing, numbers, num_reads, memory, slab_bytes, room, arrived, one, traffic)


@strict_inner
def _layer_of(link: Any, number: Any) -> Any:
    """Sequence number of the layer that a read belongs to."""
    return number // len(link.reads) * len(link.num_reads) + link.reads[number % len(link.reads), 0]


@strict_inner
def _begin(link: Any) -> Any:
    """Number of the next read; -1 if none may begin."""
    hold(link.lock)
    number = link.counts[ISSUED]
    if link.counts[IS_STOPPED] or _layer_of(link, number) >= link.counts[CONSUMED] + len(link.missing):
        number = -1
    else:
        link.counts[ISSUED] += 1
        link.counts[IN_FLIGHT] += 1
        read_begins(link.traffic)
    let_go(link.lock)
    return number


@strict
def end_read(link: Any, number: Any, is_well: Any) -> Any:
    """Record the end of a read; a failed one stops all others until `restart`."""
    hold(link.lock)
    slab = _layer_of(link, number) % len(link.missing)
    link.counts[IN_FLIGHT] -= 1
    read_ends(link.traffic, link.reads[number % len(link.reads), 3])
    link.missing[slab] -= 1
    if not is_well:
        link.counts[IS_STOPPED] = 1
    is_news = link.missing[slab] == 0 or link.counts[IN_FLIGHT] == 0 or not is_well
    let_go(link.lock)
    if is_news:
        _write(link.arrived, link.one.ctypes.data, 8)


@strict
def read_on(link: Any) -> Any:
    """Read until closed (returns CLOSED) or until a read is short or fails (returns its number, still in flight)."""
    byte = np.empty(1, np.uint8)
    while True:
        _read(link.room, byte.ctypes.data, 1)
        if link.counts[IS_CLOSED]:
            return CLOSED
        number = _begin(link)
        if number >= 0:
            _, descriptor, offset, num_bytes, needed, begin = link.reads[number % len(link.reads)]
            slab = _layer_of(link, number) % len(link.missing)
            if _pread(descriptor, link.memory + slab * link.slab_bytes + begin, num_bytes, offset) < needed:
                return number
            end_read(link, number, True)


@strict
def has_arrived(link: Any, sequence: Any) -> Any:
    """Whether a layer that was not consumed yet has arrived."""
    hold(link.lock)
    there = link.missing[sequence % len(link.missing)] == 0
    let_go(link.lock)
    return there


@strict
def consume(link: Any) -> Any:
    """Assign the oldest layer's slab to the next layer; returns the number of that layer's reads."""
    hold(link.lock)
    num_slabs = len(link.missing)
    following = link.counts[CONSUMED] + num_slabs
    num_reads = link.num_reads[following % len(link.num_reads)]
    link.missing[following % num_slabs] = num_reads
    link.counts[CONSUMED] += 1
    let_go(link.lock)
    return num_reads


@strict
def stop(link: Any) -> Any:
    """Let no read begin until `restart`; returns the number in flight."""
    hold(link.lock)
    link.counts[IS_STOPPED] = 1
    num_reads = link.counts[IN_FLIGHT]
    let_go(link.lock)
    return num_reads


@strict
def restart(link: Any) -> Any:
    """Start with the first layer, while no read is in flight; returns the number of reads that may begin."""
    hold(link.lock)
    link.counts[ISSUED] = link.counts[CONSUMED] = link.counts[IS_STOPPED] = 0
    num_reads = 0
    for slab in range(len(link.missing)):
        link.missing[slab] = link.num_reads[slab % len(link.num_reads)]
        num_reads += link.missing[slab]
    let_go(link.lock)
    return num_reads
