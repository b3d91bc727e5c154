"""Growing a tree of guesses, apart from any model: growers say which nodes to expand, and are told what may follow."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bough.growth import BestFirst
from bough.tree import Tree, best_nodes

NO_NODES = np.zeros(0, np.intp)


class Candidates(NamedTuple):
    """What a draft step says of some nodes: the tokens that may follow each, best first."""

    tokens: NDArray[np.int32]  # (num_nodes, num_candidates)
    # (num_nodes, num_candidates) conditional log-probabilities or, to sample from, logarithms of weights; -inf excludes
    log_probs: NDArray[np.float32]


class GrowingTree:
    """A tree in the making: arrays with room to spare, nodes in order of discovery."""

    def __init__(self, root_token: int, max_nodes: int) -> None:
        self.tokens = np.zeros(max_nodes, np.int32)
        self.parents = np.full(max_nodes, -1, np.int32)
        self.log_probs = np.zeros(max_nodes, np.float32)
        self.scores = np.full(max_nodes, -np.inf, np.float32)  # log-probability of the whole path
        self.depths = np.zeros(max_nodes, np.int32)
        self.expansions = np.full(max_nodes, -1, np.int32)  # where `Explored` holds what follows; -1 before
        self.num_nodes = 1
        self.tokens[0], self.scores[0] = root_token, 0.0

    @property
    def num_free(self) -> int:
        """Nodes that there is still room for."""
        return len(self.tokens) - self.num_nodes

    def append(
        self, parents: NDArray[np.intp], tokens: NDArray[np.int32], log_probs: NDArray[np.float32]
    ) -> NDArray[np.intp]:
        """Adds children of these parents, each argument (num_new,); returns the new nodes."""
        new = slice(self.num_nodes, self.num_nodes + len(parents))
        self.tokens[new], self.parents[new], self.log_probs[new] = tokens, parents, log_probs
        self.scores[new] = self.scores[parents] + log_probs
        self.depths[new] = self.depths[parents] + 1
        self.num_nodes = new.stop
        return np.arange(new.start, new.stop)

    def tree(self) -> Tree:
        """All nodes."""
        cut = slice(0, self.num_nodes)
        return Tree(self.tokens[cut].copy(), self.parents[cut].copy(), self.log_probs[cut].copy())


class Grower(Protocol):
    """One way of growing, for one tree."""

    tree: GrowingTree

    def frontier(self) -> NDArray[np.intp]:
        """Nodes to expand next, ascending; none when the tree is done. A parent is expanded before its children."""
        ...

    def take(self, frontier: NDArray[np.intp], candidates: Candidates) -> None:
        """Goes on with what may follow the nodes of the frontier, in their order."""
        ...

    def finished(self) -> Tree:
        """The tree, when the frontier is empty."""
        ...


class BestFirstGrower:
    """Expands the best nodes first (SpecExec, arXiv 2406.02532, section 4.2 and algorithm 2).

    Each draft step expands the `width` best open nodes by the log-probability of their paths; the `budget` best nodes
    are the tree. Ends when no open node is among them, after `depth` steps, or where a step cannot be worth its price:
    it adds at most as many expected tokens as the nodes that it expands are probable. A node has at most `branch`
    children, one with a token in `closed` none.
    """

    def __init__(self, root_token: int, limits: BestFirst, branch: int, closed: NDArray[np.int32]) -> None:
        self.tree = GrowingTree(root_token, 1 + limits.depth * limits.budget)
        self._limits, self._branch, self._closed = limits, branch, closed
        self._width = min(limits.width, limits.budget)  # more than these cannot be among the best, but for equals
        self._is_open = np.zeros(len(self.tree.tokens), np.bool_)  # may still be expanded
        self._is_open[0] = True
        self._num_steps = 0
        self._least_score = math.log(limits.node_price) if limits.node_price else -math.inf

    def frontier(self) -> NDArray[np.intp]:
        """The `width` best open nodes among the `budget` best nodes, but for the last of these.

        No child scores above its parent, so what stands below the last one could not take its place.
        """
        if self._limits.budget == 1 or self._num_steps == self._limits.depth:
            return NO_NODES
        scores = self.tree.scores[: self.tree.num_nodes]
        nodes = np.flatnonzero(self._is_open[: len(scores)] & (scores > self._threshold()))
        best = nodes[np.argsort(-scores[nodes], kind="stable")[: self._width]]
        return np.sort(best) if np.exp(scores[best]).sum() >= self._limits.step_price else NO_NODES

    def take(self, frontier: NDArray[np.intp], candidates: Candidates) -> None:
        """Adds the children whose score could still be among the best."""
        self._num_steps += 1
        self._is_open[frontier] = False
        log_probs = candidates.log_probs[:, : self._branch]
        scores = self.tree.scores[frontier][:, None] + log_probs
        order = np.sort(scores.ravel())[::-1]
        enough = float(order[min(self._limits.budget, len(order)) - 1])  # more than `budget` are never needed
        least = max(self._threshold(), enough, self._least_score)
        rows, ranks = np.nonzero(np.isfinite(scores) & (scores >= least))
        rows, ranks = rows[: self.tree.num_free], ranks[: self.tree.num_free]
        new = self.tree.append(frontier[rows], candidates.tokens[rows, ranks], log_probs[rows, ranks])
        self._is_open[new] = ~np.isin(self.tree.tokens[new], self._closed)

    def finished(self) -> Tree:
        """The best `budget` nodes."""
        return self.tree.tree().only(best_nodes(self.tree.scores[: self.tree.num_nodes], self._limits.budget))

    def _threshold(self) -> float:
        """The `budget`-th best score: a node below it cannot be in the tree."""
        budget, scores = self._limits.budget, self.tree.scores[: self.tree.num_nodes]
        return float(np.partition(scores, -budget)[-budget]) if len(scores) >= budget else -np.inf
