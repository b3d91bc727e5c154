"""Which nodes of many trees go into one sweep, when all of them together take longer than they are worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.protocol.cost_curve import CostCurve
from bough.trees.tree import Tree

Floats = NDArray[np.float64]
Nodes = NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Rider:
    """A tree in a sweep, by what its nodes are worth."""

    values: Floats  # (num_nodes,) expected tokens: the chance that a node is accepted, no more than its parent's
    parents: NDArray[np.int32]  # (num_nodes,) -1 at the root; parents come before children
    may_leave_out: bool = True

    @classmethod
    def of(cls, tree: Tree, may_leave_out: bool) -> Rider:
        """With the draft's own probabilities, along the paths, for chances."""
        scores, parents = tree.log_probs.astype(np.float64).tolist(), tree.parents.tolist()
        for node in range(1, len(scores)):
            scores[node] = min(0.0, scores[node]) + scores[parents[node]]
        return cls(np.exp(scores), tree.parents, may_leave_out)

    def least(self) -> Nodes:
        """What it keeps in any case: all nodes, or the root and the best of its children."""
        if not self.may_leave_out:
            return np.arange(len(self.values))
        children = np.flatnonzero(self.parents == 0)
        return np.array([0, children[np.argmax(self.values[children])]]) if len(children) else np.zeros(1, np.intp)


class Price(NamedTuple):
    """What a second is worth."""

    values_per_second: float  # that sweeps have brought, in such values as riders have
    gap_seconds: float = math.inf  # between sweeps, in which they bring nothing; infinite is not known


def divide(riders: Sequence[Rider], fixed_rows: int, cost: CostCurve, price: Price, most_rows: int) -> list[Nodes]:
    """The nodes that each rider keeps, ascending, each with its parent: those by which the sweep pays best.

    Of all sets this has the largest sum of values less what the sweep's seconds would bring elsewhere, with at most
    `most_rows` rows, `fixed_rows` of contexts among them, and what riders keep in any case. Nodes are taken best first,
    whoever's they are, so that parents come before children; every number of rows that pads nothing is compared, as
    seconds grow by steps: behind a step that does not pay may be one that does. Of what is equal, the most nodes.

    Seconds bring elsewhere what they have brought, or what they would in sweeps such as this one, divided best, with
    the gap between them (Dinkelbach's ratio): sweeps that were too long would make the next ones too long as well.
    """
    least = [rider.least() for rider in riders]
    if not any(rider.may_leave_out for rider in riders):
        return least
    begins = np.cumsum([0, *(len(rider.values) for rider in riders)])
    values = np.concatenate([rider.values for rider in riders])
    is_kept = np.zeros(len(values), np.bool_)
    for begin, nodes in zip(begins, least, strict=False):
        is_kept[begin + nodes] = True
    open_nodes = np.flatnonzero(~is_kept)
    order = open_nodes[np.argsort(-values[open_nodes], kind="stable")]
    num_rows = fixed_rows + len(values) - len(order)
    edges = _edges(num_rows, num_rows + len(order), cost, most_rows)
    gained = values[is_kept].sum() + np.append(0.0, np.cumsum(values[order]))[edges - num_rows]
    seconds = cost.at(edges)
    worth = gained - max(price.values_per_second, float((gained / (seconds + price.gap_seconds)).max())) * seconds
    best = len(edges) - 1 - int(np.argmax(worth[::-1]))
    is_kept[order[: edges[best] - num_rows]] = True
    return [np.flatnonzero(is_kept[begin:end]) for begin, end in pairwise(begins)]


def _edges(least: int, all_rows: int, cost: CostCurve, most_rows: int) -> NDArray[np.int64]:
    """Numbers of rows that are compared, ascending from the least."""
    edges = cost.steps(max(least, min(all_rows, most_rows)))
    return np.append(least, edges[edges > least])
