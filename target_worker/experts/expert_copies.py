"""Experts copied from host memory, which holds all of them, to a device with its own memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from target_worker.experts.expert_cache import Expert
from target_worker.experts.expert_store import ExpertLoader
from target_worker.link.copy_stats import CopyStats
from target_worker.link.host_layers import HostLayers
from target_worker.link.streams import DeviceEvent, DeviceStreams

SLAB_ALIGNMENT = 512  # bytes, as torch allocates: a library may choose a product's kernel, and its bits, by alignment
PREFETCH_BYTES = 64 * 1000**2  # limit of queued copies when another prefetch is queued: a demand load waits behind them


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
        """Record the compute stream's progress: slabs given up in this turn are in use until then."""
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
