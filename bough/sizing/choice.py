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
from bough.sizing.curve_arrays import seconds_at
from bough.sizing.gain_profile import GainProfile
from bough.trees.acceptance import FloatArray


@dataclass(frozen=True, slots=True)
class SweepLoad:
    """The load of a sweep besides a session's own tree, and the time of a round besides the sweep."""

    curve: CostCurve  # seconds of the sweep by rows
    num_context: int = 0  # context rows of the session itself
    num_trees: int = 1  # sessions that share the sweep, this one included
    other_rows: int | None = 0  # recent rows of the other sessions, trees and contexts; None is as many each as its own
    fixed_seconds: float = 0.0  # network, queue and other time that does not depend on the tree

    def seconds_if_all(self, num_nodes: NDArray[np.int64]) -> FloatArray:
        """(num_sizes,) seconds of a round, without drafting, if every session's tree has `num_nodes` nodes.

        Sessions that share a sweep decide by the same rule at the same time. Taking the others' trees as given would
        oscillate: a session would see a full sweep and send no tree, the next would see an empty one, and so on.
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
