"""Which experts are in memory: what leaves when another one comes, and what comes before it is wanted. Reads nothing.

What few sweeps want leaves first; of experts wanted alike, the one used last. Layers go round and round: its turn is
the farthest away, and those that stay are then the same in every round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RATE = 0.25  # by which a sweep's choice changes how often an expert is said to be wanted
LIKELY = 0.5  # wanted in so many sweeps, an expert is brought before its layer's turn
AHEAD_SHARE = 0.25  # of the room that may be taken by what was brought so and not yet wanted
GRAINS = 8  # of how often an expert is wanted: finer differences are chance
NOBODY = -1


class Expert(NamedTuple):
    """One of a model's."""

    layer: int
    number: int  # in its layer


class ExpertCache:
    """Slabs and the experts that have them. Layers' turns come in order, round and round."""

    def __init__(self, num_layers: int, most: int, num_slabs: int) -> None:
        """A layer has `most` experts at most, for all of which there is room."""
        assert num_slabs >= most, "a layer's rows may choose all its experts"
        # By layer and expert: its slab, and how often it is wanted (0 to 1); and which of them this turn has wanted.
        self._slab_of = np.full((num_layers, most), NOBODY, np.int64)
        self._usage = np.zeros((num_layers, most), np.float64)
        self._wanted = np.zeros(most, bool)
        # By slab: whose it is, when that came or was last wanted, and whether it came before its layer's turn.
        self._layer_at = np.full(num_slabs, NOBODY, np.int64)
        self._number_at = np.zeros(num_slabs, np.int64)
        self._used_at = np.zeros(num_slabs, np.int64)
        self._is_ahead = np.zeros(num_slabs, bool)
        self._clock = 0
        self.layer = NOBODY  # whose turn it is
        self._has_chosen = False  # in this turn

    def begin(self, layer: int) -> None:
        """A layer's turn."""
        if self.layer != NOBODY:
            self._usage[self.layer] += RATE * (self._wanted - self._usage[self.layer])
        self.layer = layer
        self._wanted[:], self._has_chosen = False, False
        self._is_ahead[self._layer_at == layer] = False

    def restart(self) -> None:
        """After a turn that was given up: what it wanted is no sign of what others will."""
        self.layer = NOBODY

    def slab_of(self, expert: Expert) -> int | None:
        """Where an expert is, or will be."""
        slab = int(self._slab_of[expert])
        return None if slab == NOBODY else slab

    def is_wanted(self, number: int) -> bool:
        """Whether this turn's rows have said so of an expert."""
        return bool(self._wanted[number])

    def want(self, numbers: Sequence[int]) -> None:
        """Rows of the layer whose turn it is have chosen these: they stay until it is over."""
        self._wanted[list(numbers)], self._has_chosen = True, True
        self._clock += 1
        slabs = self._slab_of[self.layer, list(numbers)]
        self._used_at[slabs[slabs != NOBODY]] = self._clock

    def take(self, slab: int, expert: Expert) -> None:
        """Gives an empty slab to an expert."""
        self._slab_of[expert] = slab
        self._layer_at[slab], self._number_at[slab] = expert
        self._used_at[slab] = self._clock
        self._is_ahead[slab] = expert.layer != self.layer or (self._has_chosen and not self._wanted[expert.number])

    def empty(self, slab: int) -> None:
        """Whoever was there leaves."""
        if self._layer_at[slab] != NOBODY:
            self._slab_of[self._layer_at[slab], self._number_at[slab]] = NOBODY
        self._layer_at[slab], self._is_ahead[slab] = NOBODY, False

    def for_wanted(self, count: int) -> list[int]:
        """Slabs: what this turn has wanted stays, and what came ahead of its own as far as that goes."""
        if not count:
            return []
        leaving = self._leaving(~((self._layer_at == self.layer) & self._wanted[self._number_at]))
        slabs: list[int] = leaving[np.argsort(self._is_ahead[leaving], kind="stable")][:count].tolist()
        return slabs

    def guesses(self, most: int) -> Iterator[tuple[Expert, int]]:
        """What the next turns, round the end of the sweep, will probably want, and slabs for it: to be taken at once.

        The layer whose turn it is comes first until its rows have chosen, and then last. What is there and as likely to
        be wanted stays, unless it is another layer's.
        """
        room = min(most, int(AHEAD_SHARE * len(self._is_ahead)) - int(self._is_ahead.sum()))
        layers, numbers = np.nonzero((self._usage > LIKELY) & (self._slab_of == NOBODY))
        if room <= 0 or not len(layers):
            return
        leaving = iter(self._leaving((self._layer_at != self.layer) & ~self._is_ahead).tolist())
        turns, grains = (layers - self.layer - self._has_chosen) % len(self._usage), self._grains(layers, numbers)
        slab = next(leaving, None)
        for guess in np.lexsort((-self._usage[layers, numbers], turns))[: 2 * room]:
            if room <= 0 or slab is None:
                return
            there = self._grains_at(np.int64(slab))
            if there < grains[guess] or (there == grains[guess] and self._layer_at[slab] != layers[guess]):
                yield Expert(int(layers[guess]), int(numbers[guess])), slab
                room, slab = room - 1, next(leaving, None)

    def _leaving(self, among: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Slabs in the order in which they are given up: empty ones, then by `GRAINS`, then the one used last."""
        slabs = np.flatnonzero(among)
        return slabs[np.lexsort((-self._used_at[slabs], self._grains_at(slabs)))]

    def _grains_at(self, slabs: NDArray[np.int64] | np.int64) -> NDArray[np.float64]:
        """How often what is in them is wanted, -1 where nothing is."""
        layers = self._layer_at[slabs]
        return np.where(layers == NOBODY, -1.0, self._grains(layers, self._number_at[slabs]))

    def _grains(self, layers: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.round(GRAINS * self._usage[layers, numbers])
