"""Experts that a layer's rows have chosen, brought to where it is computed; as many stay as there is room for.

Which experts a layer wants is known only when its router has run. So each layer says what it wants (`expect`), and what
is not there comes while the first of them are computed. While the layer computes, there also comes what the layers
after it will probably want: experts that most of the last sweeps have wanted. So large trees, which want nearly all
experts, find them brought ahead, as layers are by the ring; single tokens bring what they choose, and little else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol

import torch

from bough.errors import StreamError
from bough.model.architecture.moe import Experts, ExpertTable
from bough.model.checkpoint.tensor_source import ReusedMemory
from target_worker.experts.expert_cache import Expert, ExpertCache
from target_worker.link.layer_extents import LayerExperts, sizes_of


class ExpertLoader(Protocol):
    """How experts come into slabs: read from disk, or copied to an accelerator."""

    def __enter__(self) -> ExpertLoader:
        """Opens what it needs."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing comes any more."""
        ...

    @property
    def is_direct(self) -> bool:
        """Whether all reads go past the page cache."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the slabs are."""
        ...

    @property
    def most_guesses(self) -> int:
        """How many may be begun now, without what is wanted next having to wait for them."""
        ...

    def require_unchanged(self) -> None:
        """Raises StreamError where what is there may be of two checkpoints."""
        ...

    def renew(self) -> bool:
        """Goes on with files that have changed, if they hold the same; whether any have. Raises StreamError."""
        ...

    def begin(self) -> None:
        """Another layer's turn: whatever is computed with slabs that are given up from now on, has been told to be."""
        ...

    def bring(self, expert: Expert, slab: int, is_guess: bool) -> None:
        """Begins to.

        Raises:
            StreamError: as `arrived`, where that is known at once.
        """
        ...

    def promote(self, expert: Expert, slab: int) -> bool:
        """What was a guess is wanted now; False if it came in vain, and must be brought again."""
        ...

    def is_there(self, slab: int) -> bool:
        """Whether nobody need wait for what comes there."""
        ...

    def leave(self, slab: int) -> None:
        """Returns when nobody writes there any more."""
        ...

    def arrived(self, expert: Expert, slab: int) -> torch.Tensor:
        """A slab's bytes, uint8: what is computed with them from now on finds the expert there.

        Raises:
            StreamError: it could not be read, or is not what was written.
        """
        ...

    @property
    def wait_ns(self) -> int:
        """Since the start, for which whoever computes has waited."""
        ...


class _Asked(NamedTuple):
    """A parameter's `bough.model.architecture.moe.ExpertBytes`."""

    store: ExpertStore
    layer: int
    slot: int  # of its parameter among those of the layer's experts

    def expect(self, experts: Sequence[int]) -> Sequence[int]:
        return self.store.expect(self.layer, experts)

    def of(self, expert: int) -> Sequence[torch.Tensor]:
        return self.store.bytes_of(Expert(self.layer, expert), self.slot)


class ExpertStore:
    """The experts of a model whose layers are computed in order, round and round, by one thread, which calls this."""

    def __init__(self, layers: Mapping[int, LayerExperts], num_slabs: int, arrivals: ExpertLoader) -> None:
        """`num_slabs` are those that `arrivals` has: at least as many as a layer has experts."""
        self._layers = dict(layers)
        self._rooms = ExpertCache(max(layers) + 1, sizes_of(layers.values()).most, num_slabs)
        self._arrivals, self._num_slabs = arrivals, num_slabs

    def __enter__(self) -> ExpertStore:
        self._arrivals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._arrivals.__exit__(kind, error, trace)

    @property
    def is_direct(self) -> bool:
        """Whether all reads go past the page cache."""
        return self._arrivals.is_direct

    @property
    def wait_ns(self) -> int:
        """As `ExpertLoader.wait_ns`."""
        return self._arrivals.wait_ns

    def bind(self, dtype: torch.dtype) -> None:
        """Puts tables that ask this one in the parameters' places; values that are no views share one memory."""
        num_bytes = max(layer.scratch_bytes(dtype) for layer in self._layers.values())
        scratch = torch.empty(num_bytes, dtype=torch.uint8, device=self._arrivals.device)
        for index, layer in self._layers.items():
            for number, slot in enumerate(layer.slots):
                assert isinstance(slot.source, Experts)
                slot.put(ExpertTable(slot.source, _Asked(self, index, number), dtype, ReusedMemory(scratch)))

    def begin(self, layer: int) -> None:
        """A layer's turn has come; one without experts is none of this one's business."""
        if layer in self._layers:
            self._rooms.begin(layer)
            self._arrivals.begin()
            self._look_ahead()

    def expect(self, layer: int, experts: Sequence[int]) -> Sequence[int]:
        """Rows of the layer whose turn it is have chosen these: what is missing of them comes from now on.

        Returns them with those in front for which nobody need wait.
        """
        assert layer == self._rooms.layer, "experts are wanted in their layer's turn"
        missing = [expert for expert in (Expert(layer, number) for number in experts) if not self._is_coming(expert)]
        self._rooms.want(experts)
        for expert, slab in zip(missing, self._rooms.for_wanted(len(missing)), strict=True):
            self._bring(expert, slab, is_guess=False)
        order = sorted(experts, key=lambda number: not self._is_there(Expert(layer, number)))
        self._look_ahead()
        return order

    def bytes_of(self, expert: Expert, slot: int) -> tuple[torch.Tensor, ...]:
        """A parameter's tensors, uint8, of an expert that `expect` has named; valid until its layer's turn is over.

        Raises:
            StreamError: as `ExpertLoader.arrived`; call `restart` before the next sweep.
        """
        slab, weights = self._rooms.slab_of(expert), self._layers[expert.layer].each[expert.number]
        assert slab is not None, "who asks for an expert has said so"
        try:
            data = self._arrivals.arrived(expert, slab)
        except StreamError:
            self._empty(slab)
            raise
        return tuple(weights.bytes_of(place, data) for place in weights.slots[slot].source.places)

    def require_unchanged(self) -> None:
        """As `Tiers.require_unchanged`. Raises StreamError."""
        self._arrivals.require_unchanged()

    def renew(self) -> None:
        """As `Tiers.renew`; what came while a file was another is not kept. Raises StreamError."""
        if self._arrivals.renew():
            for slab in range(self._num_slabs):
                self._empty(slab)

    def restart(self) -> None:
        """After an error or a sweep that was given up."""
        self._rooms.restart()

    def _is_coming(self, expert: Expert) -> bool:
        """Whether an expert is there or under way, and then before what is brought ahead."""
        slab = self._rooms.slab_of(expert)
        if slab is None:
            return False
        if self._rooms.is_wanted(expert.number) or self._arrivals.promote(expert, slab):
            return True
        self._empty(slab)
        return False

    def _is_there(self, expert: Expert) -> bool:
        slab = self._rooms.slab_of(expert)
        return slab is not None and self._arrivals.is_there(slab)

    def _look_ahead(self) -> None:
        for expert, slab in self._rooms.guesses(self._arrivals.most_guesses):
            self._bring(expert, slab, is_guess=True)

    def _bring(self, expert: Expert, slab: int, is_guess: bool) -> None:
        self._empty(slab)
        self._arrivals.bring(expert, slab, is_guess)
        self._rooms.take(slab, expert)

    def _empty(self, slab: int) -> None:
        self._arrivals.leave(slab)
        self._rooms.empty(slab)
