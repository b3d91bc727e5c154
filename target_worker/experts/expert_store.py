"""Loads the experts that a layer's rows are routed to, and caches as many as there are slabs.

Which experts a layer needs is known only after its router has run. The layer announces them (`expect`), and missing
ones load while the first ones compute. Meanwhile experts that most recent sweeps have used are prefetched for later
layers: large trees, which use nearly all experts, find them there, while single tokens load little but their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch

from bough.errors import StreamError
from bough.model.architecture.moe import ExpertSources, ExpertTable
from bough.model.checkpoint.tensor_source import ReusedMemory
from target_worker.experts.expert_cache import Expert, ExpertCache
from target_worker.link.layer_extents import LayerExperts, sizes_of


class ExpertLoader(ABC):
    """Loads experts into slabs: by reading from disk, or by copying to a device."""

    is_direct: bool = True  # all reads bypass the page cache
    device: torch.device  # of the slabs

    def __enter__(self) -> Self:
        """Open files."""
        return self

    def __exit__(self, *_: object) -> None:  # noqa: B027
        """Stop loading."""

    @property
    @abstractmethod
    def max_prefetches(self) -> int:
        """How many prefetches may start now without delaying demand loads."""

    @property
    @abstractmethod
    def wait_ns(self) -> int:
        """Time for which computation has waited since the start."""

    def require_unchanged(self) -> None:  # noqa: B027
        """Check that no file that the loader reads was written to in place. Raises StreamError."""

    def begin(self) -> None:  # noqa: B027
        """Start a layer's turn. All computation with slabs that are freed from now on is already queued."""

    @abstractmethod
    def load(self, expert: Expert, slab: int, is_prefetch: bool) -> None:
        """Start loading `expert` into `slab`. Raises StreamError like `arrived` if the error is known at once."""

    def promote(self, expert: Expert, slab: int) -> bool:
        """Promote a prefetch to a demand load; False if it failed and must be issued again."""
        return True

    @abstractmethod
    def is_there(self, slab: int) -> bool:
        """Whether `arrived` would return without waiting."""

    @abstractmethod
    def leave(self, slab: int) -> None:
        """Return when nothing writes to the slab any more."""

    @abstractmethod
    def arrived(self, expert: Expert, slab: int) -> torch.Tensor:
        """The slab's bytes (uint8), complete for any computation queued from now on.

        Raises StreamError if reading failed.
        """


class _Asked(NamedTuple):
    """The `bough.model.architecture.moe.ExpertBytes` of one parameter."""

    store: ExpertStore
    layer: int
    slot: int  # index of the parameter among those of the layer's experts

    def expect(self, experts: Sequence[int]) -> Sequence[int]:
        return self.store.expect(self.layer, experts)

    def of(self, expert: int) -> Sequence[torch.Tensor]:
        return self.store.bytes_of(Expert(self.layer, expert), self.slot)


class ExpertStore:
    """The experts of a model whose layers one thread computes in order, cyclically. Only that thread calls this."""

    def __init__(self, layers: Mapping[int, LayerExperts], num_slabs: int, loader: ExpertLoader) -> None:
        """`num_slabs` is the number of slabs of `loader`: at least the number of experts of a layer."""
        self._layers = dict(layers)
        self._cache = ExpertCache(max(layers) + 1, sizes_of(layers.values()).most, num_slabs)
        self.loader = loader

    def __enter__(self) -> ExpertStore:
        self.loader.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.loader.__exit__()

    def bind(self, dtype: torch.dtype) -> None:
        """Put tables backed by this store in the parameters' places; dequantized values share one buffer."""
        num_bytes = max(layer.scratch_bytes(dtype) for layer in self._layers.values())
        scratch = torch.empty(num_bytes, dtype=torch.uint8, device=self.loader.device)
        for index, layer in self._layers.items():
            for number, slot in enumerate(layer.slots):
                assert isinstance(slot.source, ExpertSources)
                slot.assign(ExpertTable(slot.source, _Asked(self, index, number), dtype, ReusedMemory(scratch)))

    def begin(self, layer: int) -> None:
        """Start a layer's turn; layers without experts are ignored."""
        if layer in self._layers:
            self._cache.begin(layer)
            self.loader.begin()
            self._prefetch()

    def expect(self, layer: int, experts: Sequence[int]) -> Sequence[int]:
        """Announce the experts that the current layer's rows are routed to; missing ones start to load.

        Returns `experts` with those first that can be computed without waiting.
        """
        assert layer == self._cache.layer, "experts are wanted in their layer's turn"
        missing = [expert for expert in (Expert(layer, number) for number in experts) if not self._is_coming(expert)]
        self._cache.want(experts)
        for expert, slab in zip(missing, self._cache.for_wanted(len(missing)), strict=True):
            self._bring(expert, slab, is_prefetch=False)
        order = sorted(experts, key=lambda number: not self._is_there(Expert(layer, number)))
        self._prefetch()
        return order

    def bytes_of(self, expert: Expert, slot: int) -> tuple[torch.Tensor, ...]:
        """Tensors (uint8) of a parameter of an expert announced by `expect`; valid until its layer's turn is over.

        Raises StreamError as `ExpertLoader.arrived`; call `restart` before the next sweep.
        """
        slab, weights = self._cache.slab_of(expert), self._layers[expert.layer].each[expert.number]
        assert slab is not None, "who asks for an expert has said so"
        try:
            data = self.loader.arrived(expert, slab)
        except StreamError:
            self._empty(slab)
            raise
        return tuple(weights.bytes_of(place, data) for place in weights.slots[slot].source.places)

    def restart(self) -> None:
        """Abandon the current turn, after an error or an aborted sweep."""
        self._cache.restart()

    def _is_coming(self, expert: Expert) -> bool:
        """Whether an expert is cached or loading; a prefetch is promoted. One whose prefetch failed is evicted."""
        slab = self._cache.slab_of(expert)
        if slab is None:
            return False
        if self._cache.is_wanted(expert.number) or self.loader.promote(expert, slab):
            return True
        self._empty(slab)
        return False

    def _is_there(self, expert: Expert) -> bool:
        slab = self._cache.slab_of(expert)
        return slab is not None and self.loader.is_there(slab)

    def _prefetch(self) -> None:
        for expert, slab in self._cache.guesses(self.loader.max_prefetches):
            self._bring(expert, slab, is_prefetch=True)

    def _bring(self, expert: Expert, slab: int, is_prefetch: bool) -> None:
        self._empty(slab)
        self.loader.load(expert, slab, is_prefetch)
        self._cache.take(slab, expert)

    def _empty(self, slab: int) -> None:
        self.loader.leave(slab)
        self._cache.empty(slab)
