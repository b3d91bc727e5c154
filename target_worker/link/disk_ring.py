"""Reads layers from disk by threads into a ring of aligned slabs, ahead of the sweep and beyond its end.

Reads are cyclic: the first layer follows the last, so that the next sweep's first layers arrive while drafts grow
trees. A layer is a list of extents; this module knows nothing of models.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bough.errors import StreamError
from bough.model.cpu.huge_pages import large_pages
from target_worker.link.direct_io import Allocate, Disk, ReadError, Slab, cut, stream_error
from target_worker.link.disk_reader import (
    CLOSED,
    IS_CLOSED,
    Link,
    Read,
    consume,
    end_read,
    has_arrived,
    read_on,
    restart,
    stop,
)
from target_worker.link.disk_stats import DiskStats, bytes_and_busy_ns
from target_worker.link.layer_extents import LayerExtents


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """Counters of the link since the start."""

    num_bytes: int  # read
    busy_ns: int  # with at least one read in flight
    wait_ns: int  # that sweeps waited for layers

    @classmethod
    def of(cls, traffic: DiskStats, wait_ns: int) -> LinkFigures:
        """Combine the readers' counters with the sweeps' waiting time."""
        num_bytes, busy_ns = bytes_and_busy_ns(traffic)
        return cls(num_bytes, busy_ns, wait_ns)


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


class Ring:
    """Delivers layers in order, cyclically. Threads read; one consumer takes layers with `layer()`.

    Sequence number s is layer s % num_layers, in slab s % num_slabs.
    """

    def __init__(
        self,
        layers: Sequence[LayerExtents],
        disk: Disk,
        num_slabs: int,
        num_threads: int,
        allocate: Allocate = large_pages,
        traffic: DiskStats | None = None,
    ) -> None:
        """`traffic` may be shared by other readers of the same link."""
        self.layers = tuple(layers)
        self.num_slabs = num_slabs
        self._disk = disk
        slab_bytes = max(layer.num_bytes for layer in layers)
        memory = allocate(slab_bytes * num_slabs)
        self._slabs = [Slab.over(memory[i * slab_bytes : (i + 1) * slab_bytes]) for i in range(num_slabs)]
        self._pieces = [(index, piece) for index, layer in enumerate(layers) for piece in cut(layer.extents)]
        reads = [Read(index, *disk.place_of(piece)) for index, piece in self._pieces]
        (self._room, self._more_room), self._arrived = os.pipe(), os.eventfd(0)
        first, traffic = self._slabs[0].bytes.data_ptr(), traffic or DiskStats.none_yet()
        self._link = Link.of(reads, num_slabs, first, slab_bytes, self._room, self._arrived, traffic)
        self._consumed = 0  # sequence number of the next layer to take
        self._error: StreamError | None = None
        self._failed = sys.maxsize  # sequence number of the first layer with a read error
        self._failing = threading.Lock()
        self._wait_ns = 0
        self._threads = [threading.Thread(target=self._read, name=f"link-{i}", daemon=True) for i in range(num_threads)]

    def __enter__(self) -> Ring:
        self.restart()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._link.counts[IS_CLOSED] = 1
        os.write(self._more_room, bytes(len(self._threads)))
        for thread in self._threads:
            thread.join()
        for descriptor in (self._room, self._more_room, self._arrived):
            os.close(descriptor)

    @contextmanager
    def layer(self, index: int) -> Iterator[torch.Tensor]:
        """Yield the next layer's slab, (slab_bytes,) uint8, valid until the block ends.

        `index` must be the next layer.

        Raises:
            StreamError: the layer could not be read; call `restart` before the next sweep.
        """
        sequence = self._consumed
        assert sequence % len(self.layers) == index, "layers are taken in order"
        began = time.perf_counter_ns()
        while sequence < self._failed and not has_arrived(self._link, sequence):
            os.eventfd_read(self._arrived)
        if sequence >= self._failed:
            assert self._error is not None
            raise self._error
        self._wait_ns += time.perf_counter_ns() - began
        yield self._slabs[sequence % self.num_slabs].bytes
        self._consumed += 1
        os.write(self._more_room, bytes(consume(self._link)))

    def restart(self) -> None:
        """Start again with layer 0, after an error or an aborted sweep."""
        while stop(self._link):
            os.eventfd_read(self._arrived)  # until nothing writes into the slabs
        self._consumed, self._error, self._failed = 0, None, sys.maxsize
        os.write(self._more_room, bytes(restart(self._link)))

    def figures(self) -> LinkFigures:
        """Counters since the start."""
        return LinkFigures.of(self._link.traffic, self._wait_ns)

    def _read(self) -> None:
        """Run the compiled reader; repeat a failed read here to get its error."""
        while (number := read_on(self._link)) != CLOSED:
            index, piece = self._pieces[number % len(self._pieces)]
            sequence = number // len(self._pieces) * len(self.layers) + index
            try:
                self._disk.read(piece, self._slabs[sequence % self.num_slabs])
            except ReadError as exc:
                self._fail(sequence, stream_error(exc, self.layers[index], piece.extent))
            end_read(self._link, number, self._error is None)

    def _fail(self, sequence: int, error: StreamError) -> None:
        """Store the error for the sweep that takes this layer; earlier layers are still delivered."""
        with self._failing:
            if sequence < self._failed:
                self._error, self._failed = error, sequence
