"""Grows a tree of guesses without a model: growers name the nodes to expand, and receive candidates."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bough.trees.tree import Tree, best_nodes
from bough.trees.tree_plan import BestFirst

NO_NODES = np.zeros(0, np.intp)
Scores = NDArray[np.float32]
Nodes = NDArray[np.intp]


class Candidates(NamedTuple):
    """The candidates after some nodes, best first."""

    tokens: NDArray[np.int32]  # (num_nodes, num_candidates)
    # (num_nodes, num_candidates) conditional log-probabilities or, for sampling, log-weights; -inf excludes
    log_probs: NDArray[np.float32]


class GrowingTree:
    """A growing tree: arrays with spare capacity, nodes in order of discovery."""

    def __init__(self, root_token: int, max_nodes: int) -> None:
        self.tokens = np.zeros(max_nodes, np.int32)
        self.parents = np.full(max_nodes, -1, np.int32)
        self.log_probs = np.zeros(max_nodes, np.float32)
        self.scores = np.full(max_nodes, -np.inf, np.float32)  # log-probability of the whole path
        self.depths = np.zeros(max_nodes, np.int32)
        self.expansions = np.full(max_nodes, -1, np.int32)  # index in `ExpansionCache`; -1 before expansion
        self.num_nodes = 1
        self.tokens[0], self.scores[0] = root_token, 0.0

    @property
    def num_free(self) -> int:
        """Nodes that still fit."""
        return len(self.tokens) - self.num_nodes

    def append(
        self, parents: NDArray[np.intp], tokens: NDArray[np.int32], log_probs: NDArray[np.float32]
    ) -> NDArray[np.intp]:
        """Add children of these parents, each argument (num_new,); returns the new nodes."""
        new = slice(self.num_nodes, self.num_nodes + len(parents))
        self.tokens[new], self.parents[new], self.log_probs[new] = tokens, parents, log_probs
        self.scores[new], self.depths[new] = self.scores[parents] + log_probs, self.depths[parents] + 1
        self.num_nodes = new.stop
        return np.arange(new.start, new.stop)

    def tree(self) -> Tree:
        cut = slice(0, self.num_nodes)
        return Tree(self.tokens[cut].copy(), self.parents[cut].copy(), self.log_probs[cut].copy())


class Grower(Protocol):
    """A way of growing, for one tree."""

    tree: GrowingTree

    def frontier(self) -> NDArray[np.intp]:
        """Nodes to expand next, ascending; empty when the tree is done. Parents are expanded before their children."""

    def take(self, frontier: NDArray[np.intp], candidates: Candidates) -> None:
        """Continue with the candidates after the frontier's nodes, in their order."""

    def finished(self) -> Tree:
        """The tree, once the frontier is empty."""


class BestFirstGrower:
    """Expands the best nodes first (SpecExec, arXiv 2406.02532, section 4.2 and algorithm 2).

    Each draft step expands the `width` best open nodes by the log-probability of their paths; the `budget` best nodes
    are the tree. Growth ends when no open node is among these, after `depth` steps, or when a step is not worth its
    price. A node has at most `max_children` children, and none if its token is in `stop_tokens`.
    """

    def __init__(self, root_token: int, limits: BestFirst, max_children: int, stop_tokens: NDArray[np.int32]) -> None:
        self.tree = GrowingTree(root_token, 1 + limits.depth * limits.budget)
        self._limits, self._max_children, self._stop_tokens = limits, max_children, stop_tokens
        self._width = min(limits.width, limits.budget)  # of more, only equals could be among the best
        self._is_open = np.zeros(len(self.tree.tokens), np.bool_)  # not expanded yet, and may be
        self._is_open[0] = True
        self._num_steps = 0

    def frontier(self) -> NDArray[np.intp]:
        """The `width` best open nodes among the `budget` best, except the last of these.

        A child's score is at most its parent's, so children of the last one could not replace it.
        """
        if self._limits.budget == 1 or self._num_steps == self._limits.depth:
            return NO_NODES
        scores = self.tree.scores[: self.tree.num_nodes]
        best: NDArray[np.intp]
        best, gain = _best_open(scores, self._is_open, self._limits.budget, self._width)
        return best if gain >= self._limits.min_gain else NO_NODES

    def take(self, frontier: NDArray[np.intp], candidates: Candidates) -> None:
        """Add the children whose score could still be among the best."""
        self._num_steps += 1
        self._is_open[frontier] = False
        scores, room = self.tree.scores[: self.tree.num_nodes], self.tree.num_free
        new = self.tree.append(*_promising(scores, frontier, candidates, self._max_children, self._limits.budget, room))
        self._is_open[new] = ~np.isin(self.tree.tokens[new], self._stop_tokens) if len(self._stop_tokens) else True

    def finished(self) -> Tree:
        """The `budget` best nodes."""
        return self.tree.tree().only(best_nodes(self.tree.scores[: self.tree.num_nodes], self._limits.budget))


def _largest(scores: Scores, number: int) -> float:
    """The `number`-th largest score; -inf if there are fewer."""
    place = len(scores) - number
    return float(np.partition(scores, place)[place]) if place >= 0 else -np.inf


def _best_open(scores: Scores, is_open: NDArray[np.bool_], budget: int, width: int) -> tuple[Nodes, float]:
    """Open nodes to expand, ascending, and an upper bound of the expected tokens that this adds.

    A node that is not better than the `budget`-th best cannot have children in the tree. The children of any other
    node are together at most as probable as itself, and each replaces a node at least as probable as the last.
    """
    last = _largest(scores, budget)
    nodes = np.flatnonzero(is_open[: len(scores)] & (scores > last))
    nodes = np.sort(nodes[np.argsort(-scores[nodes], kind="stable")[:width]])  # ties by number
    return nodes, float((np.exp(scores[nodes]) - np.exp(last)).sum())


def _promising(
    scores: Scores, frontier: Nodes, candidates: Candidates, max_children: int, budget: int, room: int
) -> tuple[Nodes, NDArray[np.int32], Scores]:
    """Parents, tokens and log-probabilities, each (num_new,), of at most `room` children that could be in the tree."""
    tokens, log_probs = candidates.tokens[:, :max_children], candidates.log_probs[:, :max_children]
    of_children = (scores[frontier, None] + log_probs).ravel()
    enough = _largest(of_children, min(budget, len(of_children)))  # more than `budget` are never needed
    least = max(_largest(scores, budget), enough)
    places = np.flatnonzero(np.isfinite(of_children) & (of_children >= least))[:room]
    return frontier[places // log_probs.shape[1]], tokens.ravel()[places], log_probs.ravel()[places]
