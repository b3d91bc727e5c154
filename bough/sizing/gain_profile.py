"""Predicted gain of a tree by its size before it is grown, from mean node values by rank in a session's past trees.

Expected tokens grow roughly with the logarithm of the size, so ranks are pooled in doubling ranges: the best guess, the
next two, the next four, and so on. Ranges that were not grown are scaled like those that were.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.trees.acceptance import FloatArray

NUM_RANGES = 12  # up to 4,095 guesses
EDGES = (1 << np.arange(NUM_RANGES + 1)) - 1  # of ranges, in guesses: 0, 1, 3, 7, ...
SIZES = np.diff(EDGES).astype(np.float64)
PRIOR_GAIN = 0.55  # tokens for each doubling of a tree, about the middle of Sequoia's measurements
PRIOR_ROUNDS = 3.0  # weight of the prior
HALF_LIFE_ROUNDS = 12.0
LEAST_CHANGE, MOST_CHANGE = 0.5, 2.0  # limits of the scaling of ranges that were not grown


class TreeGains(NamedTuple):
    """Mean acceptance probabilities of a tree's guesses by range of ranks, as far as the tree reaches."""

    means: FloatArray  # (num_ranges,)
    shares: FloatArray  # (num_ranges,) of each range that the tree fills

    @classmethod
    def of(cls, values: FloatArray) -> TreeGains:
        """The gains of a grown tree; `values` (num_nodes,) are its nodes' acceptance probabilities, root included."""
        ranked = -np.sort(-values)[1:]
        covered = np.minimum(np.maximum(len(ranked) - EDGES[:-1], 0), SIZES)
        num = int((covered > 0).sum())
        sums = np.add.reduceat(ranked, EDGES[:num]) if num else np.zeros(0)
        return cls(sums / covered[:num], covered[:num] / SIZES[:num])


class GainProfile:
    """Mean values of nodes by rank over the rounds of one session, or of all; older rounds weigh less."""

    def __init__(self, prior: GainProfile | None = None, prior_gain: float = PRIOR_GAIN) -> None:
        """Start from a copy of `prior`, or from `prior_gain` tokens for each doubling."""
        self.means: FloatArray = prior_gain / SIZES if prior is None else prior.means.copy()
        self._rounds = np.full(NUM_RANGES, PRIOR_ROUNDS)

    def observe(self, tree: TreeGains) -> None:
        """Learn from a grown tree."""
        num = len(tree.means)
        decay = 0.5 ** (1 / HALF_LIFE_ROUNDS)
        before = self._mean_of(num)
        if num:
            self._rounds[:num] = decay * self._rounds[:num] + tree.shares
            self.means[:num] += tree.shares / self._rounds[:num] * (tree.means - self.means[:num])
            change = min(MOST_CHANGE, max(LEAST_CHANGE, self._mean_of(num) / before)) if before > 0 else 1.0
            self.means[num:] *= change
        else:  # no node was worth a draft step: count the round as a gain of 0
            self._rounds *= decay
            self.means *= decay

    def gains(self, num_nodes: NDArray[np.int64]) -> FloatArray:
        """(num_sizes,) expected tokens of trees of `num_nodes` nodes, beyond the bonus token."""
        means = np.minimum.accumulate(self.means)
        cumulated = np.concatenate(([0.0], np.cumsum(means * SIZES)))
        gains: FloatArray = np.interp(np.maximum(num_nodes - 1, 0), EDGES, cumulated)
        return gains

    def _mean_of(self, num: int) -> float:
        """Expected tokens of the first `num` ranges."""
        return float((self.means[:num] * SIZES[:num]).sum())
