"""Which experts are in memory, which are evicted, and which are prefetched. Does no I/O.

Rarely used experts are evicted first, and the most recently used among equals: layers are computed cyclically, so its
next use is the farthest away. The same experts thus stay cached in every sweep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RATE = 0.25  # weight of the latest sweep in the moving average of an expert's usage
LIKELY = 0.5  # usage above which an expert is prefetched before its layer's turn
AHEAD_SHARE = 0.25  # share of the slabs that prefetched experts not used yet may occupy
USAGE_BUCKETS = 8  # of usage: finer differences are treated as chance
NOBODY = -1


class Expert(NamedTuple):
    """Key of an expert: (layer, index in the layer)."""

    layer: int
    number: int  # index in the layer


class ExpertCache:
    """Assigns slabs to experts. Layers' turns come in order, cyclically."""

    def __init__(self, num_layers: int, most: int, num_slabs: int) -> None:
        """A layer has at most `most` experts, all of which must fit at once."""
        assert num_slabs >= most, "a layer's rows may choose all its experts"
        # By layer and expert: its slab and its usage (0 to 1). `_wanted`: experts that the current turn has used.
        self._slab_of = np.full((num_layers, most), NOBODY, np.int64)
        self._usage = np.zeros((num_layers, most), np.float64)
        self._wanted = np.zeros(most, bool)
        # By slab: its expert, the clock when that was loaded or last used, and whether it was prefetched.
        self._layer_at = np.full(num_slabs, NOBODY, np.int64)
        self._number_at = np.zeros(num_slabs, np.int64)
        self._used_at = np.zeros(num_slabs, np.int64)
        self._is_ahead = np.zeros(num_slabs, bool)
        self._clock = 0
        self.layer = NOBODY  # whose turn it is
        self._has_chosen = False  # whether the current layer's router has run

    def begin(self, layer: int) -> None:
        """Start the turn of `layer`."""
        if self.layer != NOBODY:
            self._usage[self.layer] += RATE * (self._wanted - self._usage[self.layer])
        self.layer = layer
        self._wanted[:], self._has_chosen = False, False
        self._is_ahead[self._layer_at == layer] = False

    def restart(self) -> None:
        """Forget the current, aborted turn without counting its experts as used."""
        self.layer = NOBODY

    def slab_of(self, expert: Expert) -> int | None:
        """The slab that `expert` is in or being loaded to; None if it has none."""
        slab = int(self._slab_of[expert])
        return None if slab == NOBODY else slab

    def is_wanted(self, number: int) -> bool:
        """Whether the current turn has used the expert."""
        return bool(self._wanted[number])

    def want(self, numbers: Sequence[int]) -> None:
        """Mark experts of the current layer as used: they stay until its turn is over."""
        self._wanted[list(numbers)], self._has_chosen = True, True
        self._clock += 1
        slabs = self._slab_of[self.layer, list(numbers)]
        self._used_at[slabs[slabs != NOBODY]] = self._clock

    def take(self, slab: int, expert: Expert) -> None:
        """Assign an empty slab to `expert`."""
        self._slab_of[expert] = slab
        self._layer_at[slab], self._number_at[slab] = expert
        self._used_at[slab] = self._clock
        self._is_ahead[slab] = expert.layer != self.layer or (self._has_chosen and not self._wanted[expert.number])

    def empty(self, slab: int) -> None:
        """Unassign a slab."""
        if self._layer_at[slab] != NOBODY:
            self._slab_of[self._layer_at[slab], self._number_at[slab]] = NOBODY
        self._layer_at[slab], self._is_ahead[slab] = NOBODY, False

    def for_wanted(self, count: int) -> list[int]:
        """Choose `count` slabs to reuse, prefetched ones last; experts used in the current turn stay."""
        if not count:
            return []
        leaving = self._leaving(~((self._layer_at == self.layer) & self._wanted[self._number_at]))
        slabs: list[int] = leaving[np.argsort(self._is_ahead[leaving], kind="stable")][:count].tolist()
        return slabs

    def guesses(self, most: int) -> Iterator[tuple[Expert, int]]:
        """Yield experts that the next turns will probably use, each with a slab; the caller must take each at once.

        Turns continue cyclically into the next sweep. The current layer comes first until its router has run, and last
        afterwards. An expert is displaced by a more used one, or by an equally used one of another layer.
        """
        room = min(most, int(AHEAD_SHARE * len(self._is_ahead)) - int(self._is_ahead.sum()))
        layers, numbers = np.nonzero((self._usage > LIKELY) & (self._slab_of == NOBODY))
        if room <= 0 or not len(layers):
            return
        leaving = iter(self._leaving((self._layer_at != self.layer) & ~self._is_ahead).tolist())
        turns, buckets = (layers - self.layer - self._has_chosen) % len(self._usage), self._buckets(layers, numbers)
        slab = next(leaving, None)
        for guess in np.lexsort((-self._usage[layers, numbers], turns))[: 2 * room]:
            if room <= 0 or slab is None:
                return
            there = self._buckets_at(np.int64(slab))
            if there < buckets[guess] or (there == buckets[guess] and self._layer_at[slab] != layers[guess]):
                yield Expert(int(layers[guess]), int(numbers[guess])), slab
                room, slab = room - 1, next(leaving, None)

    def _leaving(self, among: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Slabs in the order of eviction: empty ones, then by usage bucket, then the most recently used."""
        slabs = np.flatnonzero(among)
        return slabs[np.lexsort((-self._used_at[slabs], self._buckets_at(slabs)))]

    def _buckets_at(self, slabs: NDArray[np.int64] | np.int64) -> NDArray[np.float64]:
        """Usage buckets of the slabs' experts; -1 for an empty slab."""
        layers = self._layer_at[slabs]
        return np.where(layers == NOBODY, -1.0, self._buckets(layers, self._number_at[slabs]))

    def _buckets(self, layers: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.round(USAGE_BUCKETS * self._usage[layers, numbers])
