"""Reads layers from disk by threads into a ring of aligned slabs, ahead of the sweep and beyond its end.

Reads are cyclic: the first layer follows the last, so that the next sweep's first layers arrive while drafts grow
trees. A layer is a list of extents; this module knows nothing of models.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch

from bough.runtime.huge_pages import large_pages
from target_worker.link.direct_io import Allocate, Disk, ReadRange, Slab, cut
from target_worker.link.disk_stats import DiskStats, LinkFigures
from target_worker.link.layer_extents import LayerExtents


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
        wait(
            [read for reads in self._reads for read in reads if not read.cancel()]
        )  # until nothing writes to the slabs
        self._consumed = 0
        self._reads.clear()
        for sequence in range(len(self._slabs)):
            self._issue(sequence)

    def figures(self) -> LinkFigures:
        return self._traffic.figures(self._wait_ns)

    def _issue(self, sequence: int) -> None:
        """Queue the reads of a layer, whose slab is free."""
        index, slab = sequence % len(self.layers), self._slabs[sequence % len(self._slabs)]
        self._reads.append([self._threads.submit(self._read, index, piece, slab) for piece in self._pieces[index]])

    def _read(self, index: int, piece: ReadRange, slab: Slab) -> None:
        with self._traffic.reading(piece.num_bytes):
            self._disk.read(self.layers[index], piece, slab)
