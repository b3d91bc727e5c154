"""The decision itself: which size makes most tokens per second, and what a second is then worth.

What is maximised is E[tokens] / E[round seconds]. At the best size that rate is the price of a second (lambda): a node
is worth having while its chance to be accepted is above lambda times the seconds that it adds to the sweep. Numbers of
rows are padded, so seconds are a staircase: all sizes are compared, not only the next larger one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.protocol.cost_curve import CostCurve
from bough.sizing.gain_profile import GainProfile

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SweepLoad:
    """What is in a sweep beside a session's own tree, and what the round takes beside the sweep."""

    curve: CostCurve  # seconds of the sweep by rows
    num_context: int = 0  # rows of the session's own that are no guesses
    num_trees: int = 1  # sessions that share the sweep, this one included
    other_rows: int = 0  # as many as the others have had, trees and contexts
    fixed_seconds: float = 0.0  # network, queue, and whatever does not depend on the tree

    def seconds_if_all(self, num_nodes: NDArray[np.int64]) -> FloatArray:
        """Of a round in which every session has a tree of so many nodes, the draft's time left out.

        Sessions that share a sweep decide by the same rule at the same time. One that took the others' trees for given
        would find the sweep full and do without, the next one would find it empty, and so on.
        """
        return self.fixed_seconds + self.curve.at(self.num_context + self.num_trees * num_nodes)

    def seconds_beside(self, num_nodes: NDArray[np.int64], num_others: int) -> FloatArray:
        """Of a round with a tree of so many nodes, where every other session has one of `num_others`."""
        rows = self.num_context + (self.num_trees - 1) * num_others + num_nodes
        return self.fixed_seconds + self.curve.at(rows)

    def expected_sweep(self, num_nodes: int) -> float:
        """Seconds of the sweep with a tree of so many nodes, if the others are as they have been."""
        return self.curve(self.num_context + self.other_rows + num_nodes)


class Size(NamedTuple):
    """A size, and what is expected of it."""

    num_nodes: int  # the root included
    tokens: float  # of a round, of the session's own
    seconds: float  # of a round
    price: float  # what a second is worth: tokens per second of all sessions in the sweep (lambda)

    @property
    def rate(self) -> float:
        """Tokens per second of the session alone."""
        return self.tokens / self.seconds


def best_size(
    profile: GainProfile, load: SweepLoad, draft_seconds: float, sizes: NDArray[np.int64], trust: float = 1.0
) -> Size:
    """The size of most tokens per second, of equals the smallest; drafting takes `draft_seconds` whatever the size.

    Of the profile's gains a part is taken for true, `trust`.
    """
    tokens = 1.0 + trust * profile.gains(sizes)
    seconds = draft_seconds + load.seconds_if_all(sizes)
    best = int(np.argmax(tokens / seconds))
    rate = float(tokens[best] / seconds[best])
    return Size(int(sizes[best]), float(tokens[best]), float(seconds[best]), load.num_trees * rate)


def cut_size(values: FloatArray, load: SweepLoad, best: Size, share: float, most: int) -> int:
    """Nodes of a grown tree that are worth their time, by `share` of the price at the best size; 1 or more.

    `values` (num_nodes,) descending are the nodes' chances to be accepted, the root's 1 first. Of the sizes that are
    equally good the largest is taken: what is padded is free.
    """
    sizes = np.arange(1, min(len(values), most) + 1)
    seconds = load.seconds_beside(sizes, best.num_nodes)
    worth = np.cumsum(values[: len(sizes)]) - share * best.price * seconds
    return int(len(sizes) - np.argmax(worth[::-1]))
