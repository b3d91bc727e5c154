"""The choice of the tree size with the most tokens per second, and the price of a second.

It maximises E[tokens] / E[round seconds]. At the best size this rate is the price of a second (lambda): a node pays
while its acceptance probability exceeds lambda times the seconds it adds to the sweep. As rows are padded, seconds are
a staircase, so all sizes are compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.protocol.cost_curve import CostCurve
from bough.sizing.sweep_times import seconds_at
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
        """The gains of a grown tree; `values` (num_nodes,) are the acceptance probabilities of all nodes."""
        ranked = -np.sort(-values)[1:]
        covered = np.minimum(np.maximum(len(ranked) - EDGES[:-1], 0), SIZES)
        num = int((covered > 0).sum())
        sums = np.add.reduceat(ranked, EDGES[:num]) if num else np.zeros(0)
        return cls(sums / covered[:num], covered[:num] / SIZES[:num])


class GainProfile:
    """Mean values of nodes by rank over the rounds of one session, or of all; older rounds weigh less.

    Expected tokens grow roughly with the logarithm of the size, so ranks are pooled in doubling ranges: the best guess,
    the next two, the next four, and so on. Ranges that were not grown are scaled like those that were.
    """

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
        else:  # no node paid for a draft step: count the round as a gain of 0
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


@dataclass(frozen=True, slots=True)
class SweepLoad:
    """The load of a sweep except the session's own tree, and the time of a round except the sweep."""

    curve: CostCurve  # seconds of the sweep by rows
    num_context: int = 0  # context rows of the session itself
    num_trees: int = 1  # sessions that share the sweep, this one included
    other_rows: int | None = (
        0  # recent rows of the other sessions, trees and contexts; None assumes as many each as its own
    )
    fixed_seconds: float = 0.0  # network, queue and other time that does not depend on the tree

    def seconds_if_all(self, num_nodes: NDArray[np.int64]) -> FloatArray:
        """(num_sizes,) seconds of a round, without drafting, if every session's tree has `num_nodes` nodes.

        Sessions that share a sweep decide by the same rule at the same time. Taking the others' trees as fixed would
        oscillate: one session would see a full sweep and send no tree, the next would see an empty one, and so on.
        """
        return self.fixed_seconds + seconds_at(self.curve, self.num_context + self.num_trees * num_nodes)

    def seconds_beside(self, num_nodes: NDArray[np.int64], num_others: int) -> FloatArray:
        """(num_sizes,) seconds of a round with a tree of `num_nodes`, if every other session's has `num_others`."""
        rows = self.num_context + (self.num_trees - 1) * num_others + num_nodes
        return self.fixed_seconds + seconds_at(self.curve, rows)

    def expected_sweep(self, num_nodes: int) -> float:
        """Seconds of the sweep with a tree of `num_nodes` nodes and the recent rows of the others."""
        others = (self.num_trees - 1) * num_nodes if self.other_rows is None else self.other_rows
        return self.curve(self.num_context + others + num_nodes)


class PredictedSize(NamedTuple):
    """A tree size and its predicted outcome."""

    num_nodes: int  # the root included
    tokens: float  # expected tokens of a round, for this session
    seconds: float  # expected seconds of a round
    price: float  # lambda: tokens per second of all sessions in the sweep

    @property
    def rate(self) -> float:
        """Tokens per second of this session."""
        return self.tokens / self.seconds


def best_size(
    profile: GainProfile, load: SweepLoad, draft_seconds: float, sizes: NDArray[np.int64], trust: float = 1.0
) -> PredictedSize:
    """The size with the most tokens per second, the smallest among equals.

    Drafting takes `draft_seconds` for every size; the profile's gains are multiplied by `trust`.
    """
    tokens = 1.0 + trust * profile.gains(sizes)
    seconds = draft_seconds + load.seconds_if_all(sizes)
    best = int(np.argmax(tokens / seconds))
    rate = float(tokens[best] / seconds[best])
    return PredictedSize(int(sizes[best]), float(tokens[best]), float(seconds[best]), load.num_trees * rate)


def cut_size(values: FloatArray, load: SweepLoad, best: PredictedSize, share: float, most: int) -> int:
    """The number of nodes of a grown tree, at least 1, that pay at `share` of the price at the best size.

    `values` (num_nodes,) are the nodes' acceptance probabilities, descending from the root's 1. The largest among
    equally good sizes is taken, as padding is free.
    """
    sizes = np.arange(1, min(len(values), most) + 1)
    seconds = load.seconds_beside(sizes, best.num_nodes)
    worth = np.cumsum(values[: len(sizes)]) - share * best.price * seconds
    return int(len(sizes) - np.argmax(worth[::-1]))
