"""Delivers a target's layers to a sweep in order, from wherever each is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from bough.protocol.messages import Timings
from bough.runtime.host_memory import large_pages
from bough.sizing.placement import Placement, Tier
from target_worker.experts.expert_cache import Expert
from target_worker.experts.expert_loaders import ExpertCopies, ExpertReads
from target_worker.experts.expert_store import ExpertLoader, ExpertStore
from target_worker.link.device_ring import DeviceRing
from target_worker.link.direct_io import Slab
from target_worker.link.host_layers import HostLayers
from target_worker.link.layer_extents import LayerExperts, LayerExtents, sizes_of
from target_worker.link.link_stats import CopyStats, DiskStats
from target_worker.link.streams import CudaStreams, DeviceStreams


class Tiers:
    """Resident layers are read once, on entering the context; others are streamed through rings in every sweep.

    On a CPU, layers are resident in host memory or streamed from disk. A device with its own memory adds a tier: layers
    in pinned host memory. A second ring copies to the device from there, and from the ring that reads the disk.
    """

    def __init__(
        self,
        layers: Sequence[LayerExtents],
        placement: Placement,
        num_threads: int,
        streams: DeviceStreams | None = None,
        experts: Mapping[int, LayerExperts] | None = None,
        elsewhere: Mapping[int, torch.device] | None = None,
    ) -> None:
        """`streams` is None on a CPU.

        `experts`, by layer, are cached in `placement.fixed.experts` bytes when rows choose them: loaded from disk, or
        for a device with its own memory from host memory, which then holds all of them. Layers in `elsewhere` are
        resident on other devices.
        """
        self.layers = tuple(layers)
        self.placement = placement
        self._streams = streams
        self._traffic, self._copy_stats = DiskStats(), CopyStats()
        staying, on_host = placement.layers(Tier.RESIDENT if streams is None else Tier.HOST), self.layers
        numbers: dict[Expert, int] = {}
        if experts and streams is not None:
            numbers, each = numbered(experts, len(self.layers))
            staying, on_host = (*staying, *numbers.values()), (*self.layers, *each)
        self._host = HostLayers(
            on_host,
            staying,
            placement.layers(Tier.DISK),
            placement.num_slabs if streams is None else placement.num_host_slabs,
            num_threads,
            large_pages if streams is None else streams.host_memory,
            self._traffic,
        )
        self.experts: ExpertStore | None = None
        if experts:
            slab_bytes = sizes_of(experts.values()).slab_bytes
            num_slabs = placement.fixed.experts // slab_bytes
            loader: ExpertLoader
            if streams is None:
                loader = ExpertReads(experts, slab_bytes, num_slabs, num_threads, self._traffic)
            else:
                shifts = {expert: on_host[number].device_shift for expert, number in numbers.items()}
                loader = ExpertCopies(self._host, numbers, shifts, slab_bytes, num_slabs, streams, self._copy_stats)
            self.experts = ExpertStore(experts, num_slabs, loader)
        self._resources = ExitStack()
        self._resident: dict[int, torch.Tensor] = {}  # (num_bytes,) uint8, on a device with its own memory
        self.elsewhere = dict(elsewhere or {})
        self._copies: DeviceRing | None = None

    @property
    def is_direct(self) -> bool:
        return self._host.is_direct and (self.experts is None or self.experts.loader.is_direct)

    @property
    def unpinned_bytes(self) -> int:
        """Bytes of host memory that a device cannot copy directly."""
        return 0 if self._streams is None else self._streams.unpinned_bytes

    def __enter__(self) -> Tiers:
        try:
            if self._streams is not None:
                self._resources.callback(self._streams.close)
            self._resources.enter_context(self._host)
            if self._streams is not None:
                self._upload(self._streams)
            self._host.fill()
            if self.experts is not None:
                self._resources.enter_context(self.experts)
            if self._streams is not None and self.placement.streamed:
                self._copies = self._resources.enter_context(self._device_ring(self._streams))
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _upload(self, streams: DeviceStreams) -> None:
        """Put resident layers on the device, through one temporary slab."""
        resident = (*self.placement.layers(Tier.RESIDENT), *self.placement.layers(Tier.ELSEWHERE))
        if resident:
            staging = Slab.over(large_pages(max(self.layers[index].num_bytes for index in resident)))
            for index in resident:
                data = self._host.read(index, staging)
                shift = self.layers[index].device_shift
                size, device = len(data) + shift, self.elsewhere.get(index)
                memory = (
                    streams.device_memory(size)
                    if device is None
                    else torch.empty(size, dtype=torch.uint8, device=device)
                )
                self._resident[index] = memory[shift:].copy_(data)

    def _device_ring(self, streams: DeviceStreams) -> DeviceRing:
        streamed = [index for index in range(len(self.layers)) if index not in self._resident]
        sizes, shifts = zip(*((self.layers[i].num_bytes, self.layers[i].device_shift) for i in streamed), strict=True)
        return DeviceRing(streamed, sizes, self._host, streams, self.placement.num_slabs, self._copy_stats, shifts)

    @contextmanager
    def layer(self, index: int) -> Iterator[torch.Tensor]:
        """Yield a layer's slab (uint8, on its device), valid until the block ends. Streamed layers come in order.

        Raises StreamError as `HostLayers.layer`; call `restart` before the next sweep.
        """
        if self.experts is not None:
            self.experts.begin(index)
        if index in self._resident:
            yield self._resident[index]
            return
        with (self._host if self._copies is None else self._copies).layer(index) as slab:
            yield slab

    def restart(self) -> None:
        """Start again with layer 0, after an error or an aborted sweep."""
        if self.experts is not None:
            self.experts.restart()
        (self._host if self._copies is None else self._copies).restart()

    def require_unchanged(self) -> None:
        """Check after a sweep that no file that is read was written to in place. Raises StreamError."""
        self._host.require_unchanged()
        if self.experts is not None:
            self.experts.loader.require_unchanged()

    def figures(self) -> Timings:
        """Counters since the start of the link that brings weights to where they are used."""
        if self._streams is not None:
            return self._copy_stats.figures()
        figures = self._host.figures()
        if self.experts is None:
            return figures
        return replace(figures, wait_ns=figures.wait_ns + self.experts.loader.wait_ns)


def numbered(experts: Mapping[int, LayerExperts], begin: int) -> tuple[dict[Expert, int], list[LayerExtents]]:
    """All experts as one sequence of layers, and the number of each in it, counted from `begin`."""
    row = [(Expert(index, number), each) for index in experts for number, each in enumerate(experts[index].each)]
    return {expert: begin + place for place, (expert, _) in enumerate(row)}, [each for _, each in row]


def streams_of(device: torch.device) -> DeviceStreams | None:
    """Streams of a device with its own memory; None for the CPU."""
    return None if device.type == "cpu" else CudaStreams(device)
