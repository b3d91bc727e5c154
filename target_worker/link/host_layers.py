"""Layers in host memory: resident ones, and ones streamed through a ring of slabs from disk, ahead of the sweep."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager

import torch

from bough.protocol.messages import Timings
from bough.runtime.host_memory import in_pieces, large_pages
from target_worker.link.direct_io import Allocate, Disk, ReadRange, Slab, cut
from target_worker.link.layer_extents import LayerExtents
from target_worker.link.link_stats import DiskStats

PIECE_BYTES = 2 * 1000**3  # limit of one allocation


class Ring:
    """Delivers layers in order, cyclically. Threads read; one consumer takes layers with `layer()`.

    The first layer follows the last: the next sweep's first layers arrive while drafts grow trees. Sequence
    number s is layer s % num_layers, in slab s % num_slabs.
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
        self._pieces = [cut(layer.extents) for layer in layers]
        self._disk, self._traffic = disk, traffic or DiskStats()
        slab_bytes = max(layer.num_bytes for layer in layers)
        memory = allocate(slab_bytes * num_slabs)
        self._slabs = [Slab.over(memory[i * slab_bytes : (i + 1) * slab_bytes]) for i in range(num_slabs)]
        self._consumed = 0  # sequence number of the next layer to take
        self._reads: deque[list[Future[None]]] = deque()  # of the next layers to take, one for each slab
        self._wait_ns = 0
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="link")

    def __enter__(self) -> Ring:
        self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    @contextmanager
    def layer(self, index: int) -> Iterator[torch.Tensor]:
        """Yield the slab of the next layer, `index`: (slab_bytes,) uint8, valid until the block ends.

        Raises StreamError if it could not be read; call `restart` before the next sweep.
        """
        sequence = self._consumed
        assert sequence % len(self.layers) == index, "layers are taken in order"
        began = time.perf_counter_ns()
        for read in self._reads[0]:
            read.result()
        self._wait_ns += time.perf_counter_ns() - began
        yield self._slabs[sequence % len(self._slabs)].bytes
        self._reads.popleft()
        self._consumed += 1
        self._issue(sequence + len(self._slabs))

    def restart(self) -> None:
        # Until nothing writes to the slabs.
        wait([read for reads in self._reads for read in reads if not read.cancel()])
        self._consumed = 0
        self._reads.clear()
        for sequence in range(len(self._slabs)):
            self._issue(sequence)

    def figures(self) -> Timings:
        return self._traffic.figures(self._wait_ns)

    def _issue(self, sequence: int) -> None:
        """Queue the reads of a layer, whose slab is free."""
        index, slab = sequence % len(self.layers), self._slabs[sequence % len(self._slabs)]
        self._reads.append([self._threads.submit(self._read, index, piece, slab) for piece in self._pieces[index]])

    def _read(self, index: int, piece: ReadRange, slab: Slab) -> None:
        with self._traffic.reading(piece.num_bytes):
            self._disk.read(self.layers[index], piece, slab)


class HostLayers:
    """Resident layers are read once, by `fill`; others are streamed through a ring, cyclically."""

    def __init__(
        self,
        layers: Sequence[LayerExtents],
        staying: Sequence[int],
        streamed: Sequence[int],
        num_slabs: int,
        num_threads: int,
        allocate: Allocate,
        traffic: DiskStats | None = None,
    ) -> None:
        """`traffic` may be shared by other readers of the same link."""
        self._layers = tuple(layers)
        self._staying = tuple(staying)
        self._streamed = tuple(streamed)
        self._place_in_ring = {index: number for number, index in enumerate(streamed)}
        self._num_slabs = num_slabs
        self._num_threads = num_threads
        self._allocate = allocate
        self._traffic = traffic or DiskStats()
        self._resources = ExitStack()
        self._disk = Disk(extent.file for layer in layers for extent in layer.extents)
        self._slabs: dict[int, Slab] = {}
        self._ring: Ring | None = None

    @property
    def is_direct(self) -> bool:
        return self._disk.is_direct

    def stays(self, index: int) -> bool:
        return index in self._slabs

    def __enter__(self) -> HostLayers:
        self._resources.callback(self._disk.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def fill(self) -> None:
        """Allocate memory, read the resident layers and start the ring. Raises StreamError if one cannot be read."""
        layers, sizes = self._layers, [self._layers[index].num_bytes for index in self._staying]
        self._slabs = dict(zip(self._staying, map(Slab.over, self._memory(sizes)), strict=True))
        self._disk.load([layers[index] for index in self._staying], list(self._slabs.values()), self._num_threads)
        if self._streamed:
            streamed = [layers[index] for index in self._streamed]
            ring = Ring(streamed, self._disk, self._num_slabs, self._num_threads, self._allocate, self._traffic)
            self._ring = self._resources.enter_context(ring)

    def _memory(self, sizes: Sequence[int]) -> Iterator[memoryview]:
        """Yield memory of each size, several from one allocation: pinning has a cost for each and may fail for some."""
        for run in in_pieces(sizes, PIECE_BYTES):
            memory, used = self._allocate(sum(run)), 0
            for size in run:
                yield memory[used : used + size]
                used += size

    def read(self, index: int, slab: Slab) -> torch.Tensor:
        """Read a layer into the caller's slab: (num_bytes,) uint8; before `fill`, too. Raises StreamError."""
        layer = self._layers[index]
        self._disk.load([layer], [slab], self._num_threads)
        return slab.bytes[: layer.num_bytes]

    @contextmanager
    def layer(self, index: int) -> Iterator[torch.Tensor]:
        """Yield a layer's slab (uint8), valid until the block ends. Streamed layers must be taken in order.

        Raises StreamError if reading failed; call `restart` before the next sweep.
        """
        if index in self._slabs:
            yield self._slabs[index].bytes
            return
        assert self._ring is not None, "a layer that does not stay streams"
        with self._ring.layer(self._place_in_ring[index]) as slab:
            yield slab

    def restart(self) -> None:
        if self._ring is not None:
            self._ring.restart()

    def require_unchanged(self) -> None:
        """Check that no file of streamed layers was written to in place. Raises StreamError."""
        if self._ring is not None:
            self._disk.require_unchanged()

    def figures(self) -> Timings:
        """Counters since the start."""
        return self._ring.figures() if self._ring is not None else self._traffic.figures(0)
