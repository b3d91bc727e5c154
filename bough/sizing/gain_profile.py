"""What the next larger tree is worth, before it is grown: the mean value of a session's nodes by their rank in a tree.

The expected tokens of a tree grow about as the logarithm of its size, so ranks are taken together in ranges that
double: the best guess, the next two, the next four, and so on. What was not grown this time changes as what was has
changed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

NUM_RANGES = 12  # up to 4,095 guesses
EDGES = (1 << np.arange(NUM_RANGES + 1)) - 1  # of ranges, in guesses: 0, 1, 3, 7, ...
SIZES = np.diff(EDGES).astype(np.float64)
PRIOR_GAIN = 0.55  # tokens for each doubling of a tree, as between the acceptances that Sequoia's authors measured
PRIOR_ROUNDS = 3.0  # that the prior counts for
HALF_LIFE_ROUNDS = 12.0
LEAST_CHANGE, MOST_CHANGE = 0.5, 2.0  # of ranges that were not grown, by how those that were have changed


class GainProfile:
    """Mean values of nodes by rank, over the rounds of a session, or of all of them; old rounds count for less."""

    def __init__(self, prior: GainProfile | None = None, prior_gain: float = PRIOR_GAIN) -> None:
        """Begins with what `prior` knows now, or with so many tokens a doubling, as if seen in a few rounds."""
        self.means: FloatArray = prior_gain / SIZES if prior is None else prior.means.copy()
        self._rounds = np.full(NUM_RANGES, PRIOR_ROUNDS)

    def observe(self, values: FloatArray) -> None:
        """A tree has been grown; `values` (num_nodes,) with the root's are its nodes' chances to be accepted."""
        ranked = -np.sort(-values)[1:]
        covered = np.clip(len(ranked) - EDGES[:-1], 0, SIZES)
        num = int((covered > 0).sum())
        decay = 0.5 ** (1 / HALF_LIFE_ROUNDS)
        before = self._mean_of(num)
        if num:
            sums = np.add.reduceat(ranked, EDGES[:num])
            share = covered[:num] / SIZES[:num]
            self._rounds[:num] = decay * self._rounds[:num] + share
            self.means[:num] += share / self._rounds[:num] * (sums / covered[:num] - self.means[:num])
            change = min(MOST_CHANGE, max(LEAST_CHANGE, self._mean_of(num) / before)) if before > 0 else 1.0
            self.means[num:] *= change
        else:  # the draft found nothing worth a step: its best guess is worth nothing this time
            self._rounds *= decay
            self.means *= decay

    def gains(self, num_nodes: NDArray[np.int64]) -> FloatArray:
        """(num_sizes,) expected tokens of trees of so many nodes, beyond the one that the root brings."""
        means = np.minimum.accumulate(self.means)
        cumulated = np.concatenate(([0.0], np.cumsum(means * SIZES)))
        gains: FloatArray = np.interp(np.maximum(num_nodes - 1, 0), EDGES, cumulated)
        return gains

    def _mean_of(self, num: int) -> float:
        """Tokens in the first ranges."""
        return float((self.means[:num] * SIZES[:num]).sum())
