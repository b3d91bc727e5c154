"""Experts that are copied from the host's memory, where all of them are, to an accelerator with memory of its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import torch

from target_worker.experts.expert_cache import Expert
from target_worker.link.copy_stats import CopyStats
from target_worker.link.device_ring import HostSide
from target_worker.link.layer_extents import DEVICE_ALIGNMENT
from target_worker.link.streams import DeviceEvent, DeviceStreams

GUESSED_BYTES = 64 * 1000**2  # queued at most when another guess is: what is wanted next comes after them


class ExpertCopies:
    """Copies are queued; what computes with them is queued behind them."""

    is_direct = True  # nothing is read

    def __init__(
        self,
        host: HostSide,
        numbers: Mapping[Expert, int],
        shifts: Mapping[Expert, int],
        slab_bytes: int,
        num_slabs: int,
        lanes: DeviceStreams,
        traffic: CopyStats,
    ) -> None:
        """`numbers` are those by which the host knows the experts, all of which stay there; `shifts` where in a slab
        each begins.
        """
        self._host = host
        self._numbers = dict(numbers)
        self._lanes = lanes
        self._shifts = dict(shifts)
        slab_bytes += DEVICE_ALIGNMENT
        self._slabs = lanes.device_memory(num_slabs * slab_bytes).view(num_slabs, slab_bytes)
        self._traffic = traffic
        self._on_their_way: dict[int, DeviceEvent] = {}  # by slab, where nothing was told to compute with it since
        self._computed = lanes.compute_mark()  # who had this memory before may still compute with it

    def __enter__(self) -> ExpertCopies:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The lanes' own end waits for what is queued."""

    @property
    def device(self) -> torch.device:
        """Where the slabs are."""
        return self._slabs.device

    @property
    def most_guesses(self) -> int:
        """As many as keep the copying lane at work."""
        return -(-max(0, GUESSED_BYTES - self._traffic.outstanding_bytes) // self._slabs.shape[1])

    def require_unchanged(self) -> None:
        """Whoever reads for the host does."""

    def renew(self) -> bool:
        """All experts stay in the host's memory, as they were."""
        return False

    def begin(self) -> None:
        """No slab is given up in the turn in which it is computed with."""
        self._computed = self._lanes.compute_mark()

    def bring(self, expert: Expert, slab: int, is_guess: bool) -> None:
        """Queues a copy."""
        with self._host.layer(self._numbers[expert]) as data:
            copy = self._lanes.copy(data, self._slabs[slab, self._shifts[expert] :][: len(data)], self._computed)
        self._traffic.copied(copy, len(data))
        self._on_their_way[slab] = copy.done

    def promote(self, expert: Expert, slab: int) -> bool:
        """Copies keep their order."""
        return True

    def is_there(self, slab: int) -> bool:
        """Whether the copy has ended."""
        return slab not in self._on_their_way or self._on_their_way[slab].query()

    def leave(self, slab: int) -> None:
        """Nobody waits: the next copy to the slab does not begin before the last one to it has ended."""
        self._on_their_way.pop(slab, None)

    @property
    def wait_ns(self) -> int:
        """With waits for layers, which are counted where all copies are."""
        return self._traffic.figures().wait_ns

    def arrived(self, expert: Expert, slab: int) -> torch.Tensor:
        """The computing lane waits, not the caller."""
        if slab in self._on_their_way:
            ready = self._lanes.compute_mark()
            self._lanes.compute_after(self._on_their_way.pop(slab))
            self._traffic.waited(ready, self._lanes.compute_mark())
        return self._slabs[slab, self._shifts[expert] :]
