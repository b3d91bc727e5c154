"""Experts read from disk into host memory, or copied from there to a device with its own memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from bough.runtime.host_memory import large_pages
from target_worker.experts.expert_cache import Expert
from target_worker.experts.expert_store import ExpertLoader
from target_worker.link.direct_io import Allocate, Disk, ReadRange, Slab, cut
from target_worker.link.host_layers import HostLayers
from target_worker.link.layer_extents import LayerExperts, LayerExtents
from target_worker.link.link_stats import CopyStats, DiskStats
from target_worker.link.streams import DeviceEvent, DeviceStreams

SLAB_ALIGNMENT = 512  # bytes, as torch allocates: a library may choose a product's kernel, and its bits, by alignment
PREFETCH_BYTES = 64 * 1000**2  # limit of queued copies when another prefetch is queued: a demand load waits behind them


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
        self._reads: dict[int, list[Future[None]]] = {}  # by slab: reads in flight, or with an unchecked result
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


class ExpertCopies(ExpertLoader):
    """Queues copies on one stream; the compute stream waits for their events."""

    def __init__(
        self,
        host: HostLayers,
        numbers: Mapping[Expert, int],
        shifts: Mapping[Expert, int],
        slab_bytes: int,
        num_slabs: int,
        streams: DeviceStreams,
        traffic: CopyStats,
    ) -> None:
        """`numbers` are the experts' layer numbers in `host`; `shifts` are their byte offsets in a slab.

        `slab_bytes` is a multiple of SLAB_ALIGNMENT.
        """
        assert slab_bytes % SLAB_ALIGNMENT == 0, "experts are read in whole blocks of a disk"
        self._host = host
        self._numbers = dict(numbers)
        self._streams = streams
        self._shifts = dict(shifts)
        slab_bytes += SLAB_ALIGNMENT
        self._slabs = streams.device_memory(num_slabs * slab_bytes).view(num_slabs, slab_bytes)
        self.device = self._slabs.device
        self._traffic = traffic
        self._on_their_way: dict[int, DeviceEvent] = {}  # by slab: copies that the compute stream does not wait for yet
        self._computed = streams.compute_event()  # recycled memory may still be in use by queued computation

    @property
    def max_prefetches(self) -> int:
        """The number of prefetches that keeps the copy stream busy."""
        return -(-max(0, PREFETCH_BYTES - self._traffic.outstanding_bytes) // self._slabs.shape[1])

    def begin(self) -> None:
        """Record the compute stream's progress: slabs freed in this turn are in use until then."""
        self._computed = self._streams.compute_event()

    def load(self, expert: Expert, slab: int, is_prefetch: bool) -> None:
        with self._host.layer(self._numbers[expert]) as data:
            copy = self._streams.copy(data, self._slabs[slab, self._shifts[expert] :][: len(data)], self._computed)
        self._traffic.copied(copy, len(data))
        self._on_their_way[slab] = copy.done

    def is_there(self, slab: int) -> bool:
        return slab not in self._on_their_way or self._on_their_way[slab].query()

    def leave(self, slab: int) -> None:
        """Forget the copy without waiting: the next copy to the slab is queued behind it."""
        self._on_their_way.pop(slab, None)

    @property
    def wait_ns(self) -> int:
        """Includes waits for layers: all copies are counted together."""
        return self._traffic.figures().wait_ns

    def arrived(self, expert: Expert, slab: int) -> torch.Tensor:
        """Make the compute stream, not the caller, wait for the copy."""
        if slab in self._on_their_way:
            ready = self._streams.compute_event()
            self._streams.compute_after(self._on_their_way.pop(slab))
            self._traffic.waited(ready, self._streams.compute_event())
        return self._slabs[slab, self._shifts[expert] :]
