"""Which nodes of many trees go into one sweep, when all of them together take longer than they are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bough.sizing.cost_curve import CostCurve
from bough.tree import Tree

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


def divide(
    riders: Sequence[Rider], fixed_rows: int, cost: CostCurve, tokens_per_second: float, most_rows: int
) -> list[Nodes]:
    """The nodes that each rider keeps, ascending, each with its parent: those by which the sweep pays best.

    Of all sets this has the largest sum of values less what the sweep's seconds would bring elsewhere, with at most
    `most_rows` rows, `fixed_rows` of contexts among them, and what riders keep in any case. Nodes are taken best first,
    whoever's they are, so that parents come before children; every number of rows that pads nothing is compared, as
    seconds grow by steps: behind a step that does not pay may be one that does. Of what is equal, the most nodes.
    """
    least = [rider.least() for rider in riders]
    if not any(rider.may_leave_out for rider in riders):
        return least
    begins = np.cumsum([0, *(len(rider.values) for rider in riders)])
    values = np.concatenate([rider.values for rider in riders])
    is_kept = np.zeros(len(values), np.bool_)
    for begin, nodes in zip(begins, least, strict=False):
        is_kept[begin + nodes] = True
    num_least = int(is_kept.sum())
    open_nodes = np.flatnonzero(~is_kept)
    order = open_nodes[np.argsort(-values[open_nodes], kind="stable")]
    num_more = _best_number(values[order], fixed_rows + num_least, cost, tokens_per_second, most_rows)
    is_kept[order[:num_more]] = True
    return [np.flatnonzero(is_kept[begin:end]) for begin, end in pairwise(begins)]


def _best_number(values: Floats, num_rows: int, cost: CostCurve, tokens_per_second: float, most_rows: int) -> int:
    """How many of these values, which descend, are worth their rows beside so many others."""
    most = max(num_rows, min(num_rows + len(values), most_rows))
    edges = cost.steps(most)
    edges = np.append(num_rows, edges[edges > num_rows])
    gained = np.append(0.0, np.cumsum(values))[edges - num_rows]
    worth = gained - tokens_per_second * cost.at(edges)
    return int(edges[len(edges) - 1 - np.argmax(worth[::-1])]) - num_rows
