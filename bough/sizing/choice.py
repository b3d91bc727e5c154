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

from bough.sizing.cost_curve import CostCurve
from bough.sizing.gain_profile import GainProfile

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SweepLoad:
    """What is in a sweep beside a session's own tree, and what the round takes beside the sweep."""

    curve: CostCurve  # seconds of the sweep by rows
    other_rows: int = 0  # contexts and other sessions' trees
    other_tokens: float = 0.0  # that those sessions may expect of it
    fixed_seconds: float = 0.0  # network, queue, and whatever does not depend on the tree

    def seconds(self, num_nodes: NDArray[np.int64] | int) -> FloatArray:
        """Of a round with trees of so many nodes, the draft's time left out."""
        return self.fixed_seconds + self.curve.at(self.other_rows + np.asarray(num_nodes))


class Size(NamedTuple):
    """A size, and what is expected of it."""

    num_nodes: int  # the root included
    tokens: float  # of a round, of the session's own
    seconds: float  # of a round
    rate: float  # tokens per second, of all sessions in the sweep

    @property
    def own_rate(self) -> float:
        """Tokens per second of the session alone."""
        return self.tokens / self.seconds


def best_size(
    profile: GainProfile, load: SweepLoad, draft_seconds: float, sizes: NDArray[np.int64], trust: float = 1.0
) -> Size:
    """The size of most tokens per second, of equals the smallest; drafting takes `draft_seconds` whatever the size.

    Of the profile's gains a part is taken for true, `trust`.
    """
    tokens = 1.0 + trust * profile.gains(sizes)
    seconds = draft_seconds + load.seconds(sizes)
    rates = (tokens + load.other_tokens) / seconds
    best = int(np.argmax(rates))
    return Size(int(sizes[best]), float(tokens[best]), float(seconds[best]), float(rates[best]))


def cut_size(values: FloatArray, load: SweepLoad, price: float, most: int) -> int:
    """Nodes of a grown tree that are worth their time at a price of so many tokens per second; 1 or more.

    `values` (num_nodes,) descending are the nodes' chances to be accepted, the root's 1 first. Of the sizes that are
    equally good the largest is taken: what is padded is free.
    """
    sizes = np.arange(1, min(len(values), most) + 1)
    worth = np.cumsum(values[: len(sizes)]) - price * load.seconds(sizes)
    return int(len(sizes) - np.argmax(worth[::-1]))
