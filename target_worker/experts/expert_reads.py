"""Experts read from disk into host memory, where the CPU computes with them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from bough.runtime.huge_pages import large_pages
from target_worker.experts.expert_cache import Expert
from target_worker.experts.expert_store import ExpertLoader
from target_worker.link.direct_io import Allocate, Disk, ReadRange, Slab, cut
from target_worker.link.disk_stats import DiskStats
from target_worker.link.layer_extents import LayerExperts, LayerExtents


class ExpertReads(ExpertLoader):
    """Has several reads in flight; demand loads do not queue behind prefetches."""

    device = torch.device("cpu")
    wait_ns = 0

    def __init__(
        self,
        layers: Mapping[int, LayerExperts],
        slab_bytes: int,
        num_slabs: int,
        num_threads: int,
        traffic: DiskStats | None = None,
        allocate: Allocate = large_pages,
    ) -> None:
        """`traffic` may be shared with other readers."""
        self._layers = dict(layers)
        memory = allocate(num_slabs * slab_bytes)
        self._slabs = [Slab.over(memory[i * slab_bytes : (i + 1) * slab_bytes]) for i in range(num_slabs)]
        self._num_threads = num_threads
        self._reads: dict[int, list[Future[None]]] = {}  # by slab: reads in flight, or whose result was not checked yet
        self._traffic = traffic or DiskStats()

    def __enter__(self) -> ExpertReads:
        each = [expert for layer in self._layers.values() for expert in layer.each]
        self._disk = Disk(extent.file for expert in each for extent in expert.extents)
        self.is_direct = self._disk.is_direct
        self._threads, self._prefetching = (
            ThreadPoolExecutor(self._num_threads, thread_name_prefix=name) for name in ("experts", "experts-ahead")
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._prefetching.shutdown(cancel_futures=True)
        self._disk.close()

    @property
    def max_prefetches(self) -> int:
        """Unlimited: prefetches have their own threads."""
        return len(self._slabs)

    def require_unchanged(self) -> None:
        self._disk.require_unchanged()

    def load(self, expert: Expert, slab: int, is_prefetch: bool) -> None:
        weights, threads = self._weights(expert), self._prefetching if is_prefetch else self._threads
        self._reads[slab] = [threads.submit(self._read, weights, piece, slab) for piece in cut(weights.extents)]

    def promote(self, expert: Expert, slab: int) -> bool:
        """Move reads that have not begun from the prefetch queue to the demand queue."""
        reads, weights = self._reads.get(slab, []), self._weights(expert)
        if any(read.done() and read.exception() for read in reads):
            return False
        for number, piece in enumerate(cut(weights.extents) if reads else ()):
            if reads[number].cancel():
                reads[number] = self._threads.submit(self._read, weights, piece, slab)
        return True

    def is_there(self, slab: int) -> bool:
        return all(read.done() for read in self._reads.get(slab, ()))

    def leave(self, slab: int) -> None:
        """Cancel queued reads and wait for those in flight."""
        self._wait([read for read in self._reads.pop(slab, ()) if not read.cancel()])

    def arrived(self, expert: Expert, slab: int) -> torch.Tensor:
        """Wait for the reads."""
        data = self._slabs[slab].bytes
        if slab in self._reads:
            self._wait(self._reads[slab])
            for read in self._reads[slab]:
                read.result()
            del self._reads[slab]
        return data

    def _weights(self, expert: Expert) -> LayerExtents:
        return self._layers[expert.layer].each[expert.number]

    def _wait(self, reads: Sequence[Future[None]]) -> None:
        began = time.perf_counter_ns()
        wait(reads)
        self.wait_ns += time.perf_counter_ns() - began

    def _read(self, weights: LayerExtents, piece: ReadRange, slab: int) -> None:
        with self._traffic.reading(piece.num_bytes):
            self._disk.read(weights, piece, self._slabs[slab])
