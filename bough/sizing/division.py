"""Selection of the nodes of several trees for one shared sweep, when not all of them pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.protocol.cost_curve import CostCurve
from bough.sizing.curve_arrays import seconds_at, sizes_up_to
from bough.trees.tree import Tree

Floats = NDArray[np.float64]
Nodes = NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class SweepTree:
    """A tree in a sweep, with the values of its nodes."""

    values: Floats  # (num_nodes,) acceptance probability, which is the expected tokens; never above the parent's
    parents: NDArray[np.int32]  # (num_nodes,) -1 at the root; parents come before children
    may_leave_out: bool = True

    @classmethod
    def of(cls, tree: Tree, may_leave_out: bool) -> SweepTree:
        """The values are the products of the nodes' estimates along paths: calibrated by the sender, or the draft's."""
        return cls(np.exp(tree.scores().astype(np.float64)), tree.parents, may_leave_out)

    def least(self) -> Nodes:
        """Nodes that are always kept: all, or the root and its best child."""
        if not self.may_leave_out:
            return np.arange(len(self.values))
        children = np.flatnonzero(self.parents == 0)
        return np.array([0, children[np.argmax(self.values[children])]]) if len(children) else np.zeros(1, np.intp)


class Price(NamedTuple):
    """The value of a second."""

    values_per_second: float  # recent yield of sweeps, in the trees' values
    gap_seconds: float = math.inf  # idle time between sweeps; infinite is unknown


def divide(trees: Sequence[SweepTree], fixed_rows: int, cost: CostCurve, price: Price, most_rows: int) -> list[Nodes]:
    """The nodes that each tree keeps, ascending and closed under parents, so that the sweep pays best.

    It maximises the sum of values minus the price of the sweep's seconds, with at most `most_rows` rows, of which
    `fixed_rows` are contexts, and with each tree's `least` nodes. Nodes of all trees are taken best first, so parents
    precede children. All numbers of rows without padding are compared, as seconds grow in steps and a step that pays
    may follow one that does not. Among equals the most nodes are kept.

    The price is the larger of the recent yield and the best yield of sweeps like this one, their gaps included
    (Dinkelbach's ratio): with the recent yield alone, overlong sweeps would perpetuate themselves.
    """
    least = [tree.least() for tree in trees]
    if not any(tree.may_leave_out for tree in trees):
        return least
    begins = np.cumsum([0, *(len(tree.values) for tree in trees)])
    values = np.concatenate([tree.values for tree in trees])
    is_kept = np.zeros(len(values), np.bool_)
    for begin, nodes in zip(begins, least, strict=False):
        is_kept[begin + nodes] = True
    open_nodes = np.flatnonzero(~is_kept)
    order = open_nodes[np.argsort(-values[open_nodes], kind="stable")]
    num_rows = fixed_rows + len(values) - len(order)
    edges = _edges(num_rows, num_rows + len(order), cost, most_rows)
    gained = values[is_kept].sum() + np.append(0.0, np.cumsum(values[order]))[edges - num_rows]
    seconds = seconds_at(cost, edges)
    worth = gained - max(price.values_per_second, float((gained / (seconds + price.gap_seconds)).max())) * seconds
    best = len(edges) - 1 - int(np.argmax(worth[::-1]))
    is_kept[order[: edges[best] - num_rows]] = True
    return [np.flatnonzero(is_kept[begin:end]) for begin, end in pairwise(begins)]


def _edges(least: int, all_rows: int, cost: CostCurve, most_rows: int) -> NDArray[np.int64]:
    """Numbers of rows to compare, ascending from `least`."""
    edges = sizes_up_to(cost, max(least, min(all_rows, most_rows)))
    return np.append(least, edges[edges > least])
