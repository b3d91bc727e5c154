"""How link threads read: a loop that needs no Python.

On few processors a thread that holds the interpreter is often put aside for one that computes. A sweep, which needs
the interpreter between layers, would wait for it; so reads that go well never take it.
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
    """One read of a round."""

    layer: int
    descriptor: int
    offset: int  # in the file
    num_bytes: int
    needed: int  # of these: the last read of a file may reach beyond its end
    begin: int  # in the layer's slab


class Link(NamedTuple):
    """What those who read and the one who takes layers have in common.

    All that changes is under the lock, but for `IS_CLOSED`, which is set before the last bytes of `room`.

    Read n is read n % num_reads of its round; layer s (`CONSUMED` and the like count them all) is layer
    s % num_layers, in slab s % num_slabs.
    """

    lock: Ints
    counts: Ints
    missing: Ints  # (num_slabs,) reads to come of the layer that each slab has, or will have next
    reads: Ints  # (num_reads, 6) `Read`
    num_reads: Ints  # (num_layers,) of each layer
    memory: int  # address of the first slab
    slab_bytes: int
    room: int  # a pipe with at least one byte for each read that may begin: each wakes one thread, an eventfd's all
    arrived: int  # an eventfd that is raised when a layer has arrived, and when no read is under way any more
    one: Ints  # by how much: the kernel reads it here, and a local array could be gone by then
    traffic: DiskStats  # of all who read over the same link

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
        """Of the reads of all layers, in order."""
        lock, counts, missing = (np.zeros(size, np.int64) for size in (2 * APART, 5, num_slabs))
        numbers, num_reads = np.array(reads, np.int64), np.bincount([read.layer for read in reads]).astype(np.int64)
        one = np.ones(1, np.int64)
        return cls(lock, counts, missing, numbers, num_reads, memory, slab_bytes, room, arrived, one, traffic)


@strict_inner
def _layer_of(link: Any, number: Any) -> Any:
    """Which of all layers a read is for."""
    return number // len(link.reads) * len(link.num_reads) + link.reads[number % len(link.reads), 0]


@strict_inner
def _begin(link: Any) -> Any:
    """Number of the next read, -1 if none may begin."""
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
    """After a read; one that went wrong stops all others until `restart`."""
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
    """Reads as long as all goes well: CLOSED, or the number of a read that did not bring what it should, under way."""
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
    """Whether a layer that is not consumed is there."""
    hold(link.lock)
    there = link.missing[sequence % len(link.missing)] == 0
    let_go(link.lock)
    return there


@strict
def consume(link: Any) -> Any:
    """Gives the oldest layer's slab to the next that has none; with how many reads it comes."""
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
    """Lets no read begin until `restart`; how many are under way."""
    hold(link.lock)
    link.counts[IS_STOPPED] = 1
    num_reads = link.counts[IN_FLIGHT]
    let_go(link.lock)
    return num_reads


@strict
def restart(link: Any) -> Any:
    """Begins with the first layer, while no read is under way; how many reads there is room for."""
    hold(link.lock)
    link.counts[ISSUED] = link.counts[CONSUMED] = link.counts[IS_STOPPED] = 0
    num_reads = 0
    for slab in range(len(link.missing)):
        link.missing[slab] = link.num_reads[slab % len(link.num_reads)]
        num_reads += link.missing[slab]
    let_go(link.lock)
    return num_reads
