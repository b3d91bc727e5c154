"""A target's layers, wherever each lives, delivered in order to a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType

import torch

from bough.placement import Placement, Tier
from target_worker.disk import Disk, Slab
from target_worker.stream import LinkFigures, Ring
from target_worker.weights import LayerWeights

NO_LINK = LinkFigures(0, 0, 0)


class Tiers:
    """Resident layers are read once, when the block begins; the others come through a ring, sweep after sweep."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        placement: Placement,
        num_threads: int,
        checksums: Mapping[str, int] | None = None,
    ) -> None:
        """`checksums` (crc32 by tensor name) are compared when a layer is seen for the first time."""
        self.layers = tuple(layers)
        self.placement = placement
        self._num_threads = num_threads
        self._checksums = dict(checksums or {})
        self._unseen = set(range(len(layers))) if checksums else set()
        self._resources = ExitStack()
        self._disk = Disk(extent.file for layer in layers for extent in layer.extents)
        self._resident: dict[int, Slab] = {}
        streamed = [index for index in range(len(layers)) if index not in placement.layers(Tier.RESIDENT)]
        self._place_in_ring = {index: number for number, index in enumerate(streamed)}
        self._ring: Ring | None = None
        if streamed:
            self._ring = Ring([self.layers[i] for i in streamed], self._disk, placement.num_slabs, num_threads)

    @property
    def is_direct(self) -> bool:
        """Whether all reads go past the page cache."""
        return self._disk.is_direct

    def is_resident(self, index: int) -> bool:
        """Whether a layer's bytes stay where they are."""
        return index in self._resident

    def __enter__(self) -> Tiers:
        self._resources.callback(self._disk.close)
        try:
            self._resident = {i: Slab.allocate(self.layers[i].num_bytes) for i in self.placement.layers(Tier.RESIDENT)}
            loaded = [self.layers[index] for index in self._resident]
            self._disk.load(loaded, list(self._resident.values()), self._num_threads)
            if self._ring is not None:
                self._resources.enter_context(self._ring)
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    @contextmanager
    def layer(self, index: int) -> Iterator[torch.Tensor]:
        """A layer's slab, uint8, valid until the block ends. Layers that stream are taken in order.

        Raises:
            StreamError: it could not be read, or is not what was written; call `restart` before the next sweep.
        """
        resident = self._resident.get(index)
        if resident is not None:
            self._check(index, resident.bytes)
            yield resident.bytes
            return
        assert self._ring is not None, "a layer that is not resident streams"
        with self._ring.layer(self._place_in_ring[index]) as slab:
            self._check(index, slab)
            yield slab

    def restart(self) -> None:
        """Begins again with layer 0, after an error or a sweep that was given up."""
        if self._ring is not None:
            self._ring.restart()

    def figures(self) -> LinkFigures:
        """Counters of the link since the start."""
        return self._ring.figures() if self._ring is not None else NO_LINK

    def _check(self, index: int, slab: torch.Tensor) -> None:
        if index in self._unseen:
            self.layers[index].verify(slab, self._checksums)
            self._unseen.discard(index)
