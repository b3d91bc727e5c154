"""Growing a tree of guesses, apart from any model: whoever calls gives a function that expands nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.growth import BestFirst
from bough.tree import Tree


class Children(NamedTuple):
    """What a draft step says of some nodes: the best children of each, best first."""

    tokens: NDArray[np.int32]  # (num_nodes, branch)
    log_probs: NDArray[np.float32]  # (num_nodes, branch) conditional, not above 0


class Growth:
    """A tree in the making: arrays with room to spare, nodes in order of discovery."""

    def __init__(self, root_token: int, max_nodes: int) -> None:
        self.tokens = np.zeros(max_nodes, np.int32)
        self.parents = np.full(max_nodes, -1, np.int32)
        self.log_probs = np.zeros(max_nodes, np.float32)
        self.scores = np.full(max_nodes, -np.inf, np.float32)  # log-probability of the whole path
        self.depths = np.zeros(max_nodes, np.int32)
        self.is_open = np.zeros(max_nodes, np.bool_)  # may still be expanded
        self.num_nodes = 1
        self.tokens[0], self.scores[0], self.is_open[0] = root_token, 0.0, True

    def threshold(self, budget: int) -> float:
        """The `budget`-th best score: a node below it cannot be in the tree."""
        scores = self.scores[: self.num_nodes]
        return float(np.partition(scores, -budget)[-budget]) if self.num_nodes > budget else -np.inf

    def frontier(self, limits: BestFirst) -> NDArray[np.intp]:
        """The `width` best open nodes among the `budget` best nodes, in order of discovery."""
        count = self.num_nodes
        eligible = self.is_open[:count] & (self.scores[:count] >= self.threshold(limits.budget))
        nodes = np.flatnonzero(eligible)
        best = nodes[np.argsort(-self.scores[nodes], kind="stable")[: limits.width]]
        return np.sort(best)

    def add(self, frontier: NDArray[np.intp], children: Children, budget: int, closed: frozenset[int]) -> None:
        """Adds the children whose score could still be among the best; `closed` tokens are never expanded."""
        self.is_open[frontier] = False
        scores = self.scores[frontier][:, None] + children.log_probs
        order = np.sort(scores.ravel())[::-1]
        enough = order[min(budget, len(order)) - 1]  # more than `budget` new nodes are never needed
        is_wanted = np.isfinite(scores) & (scores >= max(self.threshold(budget), float(enough)))
        rows, ranks = np.nonzero(is_wanted)
        rows, ranks = rows[: len(self.tokens) - self.num_nodes], ranks[: len(self.tokens) - self.num_nodes]
        new = slice(self.num_nodes, self.num_nodes + len(rows))
        self.tokens[new] = children.tokens[rows, ranks]
        self.parents[new] = frontier[rows]
        self.log_probs[new] = children.log_probs[rows, ranks]
        self.scores[new] = scores[rows, ranks]
        self.depths[new] = self.depths[frontier[rows]] + 1
        self.is_open[new] = ~np.isin(self.tokens[new], list(closed))
        self.num_nodes = new.stop

    def tree(self, budget: int) -> Tree:
        """The best `budget` nodes."""
        cut = slice(0, self.num_nodes)
        return Tree(self.tokens[cut].copy(), self.parents[cut].copy(), self.log_probs[cut].copy()).trimmed(budget)


def grow_best_first(
    root_token: int,
    limits: BestFirst,
    closed: frozenset[int],
    expand: Callable[[Growth, Sequence[int]], Children],
) -> Tree:
    """Expands the best nodes first (SpecExec, arXiv 2406.02532, section 4.2 and algorithm 2).

    Each draft step expands the `width` best open nodes by the log-probability of their paths; the `budget` best nodes
    are the tree. Ends when no open node is among them, or after `depth` steps. `expand` gets the growth and the nodes,
    in order of discovery: a parent is always expanded before its children. Nodes with a token in `closed` get no
    children.
    """
    growth = Growth(root_token, max_nodes=1 + limits.depth * limits.budget)
    for _ in range(limits.depth):
        if limits.budget == 1:
            break
        frontier = growth.frontier(limits)
        if len(frontier) == 0:
            break
        growth.add(frontier, expand(growth, frontier.tolist()), limits.budget, closed)
    return growth.tree(limits.budget)
