"""Growing the best nodes first. What is chosen of thousands of nodes in every draft step is chosen in compiled code."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from bough.model.cpu.jit import compiled
from bough.trees.tree import Tree, best_nodes
from bough.trees.tree_plan import BestFirst
from draft_worker.growth.grower import NO_NODES, Candidates, GrowingTree


class BestFirstGrower:
    """Expands the best nodes first (SpecExec, arXiv 2406.02532, section 4.2 and algorithm 2).

    Each draft step expands the `width` best open nodes by the log-probability of their paths; the `budget` best nodes
    are the tree. Ends when no open node is among them, after `depth` steps, or where a step cannot be worth its price.
    A node has at most `branch` children, one with a token in `closed` none.
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
        best: NDArray[np.intp]
        best, gain = _best_open(scores, self._is_open, self._limits.budget, self._width)
        return best if gain >= self._limits.step_price else NO_NODES

    def take(self, frontier: NDArray[np.intp], candidates: Candidates) -> None:
        """Adds the children whose score could still be among the best."""
        self._num_steps += 1
        self._is_open[frontier] = False
        scores, room = self.tree.scores[: self.tree.num_nodes], self.tree.num_free
        limits = self._branch, self._limits.budget, self._least_score, room
        new = self.tree.append(*_promising(scores, frontier, *candidates, *limits))
        self._is_open[new] = ~np.isin(self.tree.tokens[new], self._closed) if len(self._closed) else True

    def finished(self) -> Tree:
        """The best `budget` nodes."""
        return self.tree.tree().only(best_nodes(self.tree.scores[: self.tree.num_nodes], self._limits.budget))


@compiled
def _largest(scores, number):  # type: ignore[no-untyped-def]
    """The so manieth largest score; -inf where there are fewer."""
    place = len(scores) - number
    return np.partition(scores, place)[place] if place >= 0 else np.float32(-np.inf)


@compiled
def _best_open(scores, is_open, budget, width):  # type: ignore[no-untyped-def]
    """Open nodes, ascending, and how many expected tokens it can add at most to expand them.

    One that is no better than the `budget`-th best cannot have children in the tree. All children of another are
    together no more probable than it, and each takes the place of a node that is no less probable than that last one.
    """
    last = _largest(scores, budget)
    nodes = np.flatnonzero(is_open[: len(scores)] & (scores > last))
    nodes = np.sort(nodes[np.argsort(-scores[nodes], kind="mergesort")[:width]])  # of equals the first
    return nodes, (np.exp(scores[nodes]) - np.exp(last)).sum()


@compiled
def _promising(scores, frontier, tokens, log_probs, branch, budget, least_score, room):  # type: ignore[no-untyped-def]
    """Parents, tokens and log-probabilities, each (num_new,), of children that could be in the tree: at most `room`."""
    num_rows, num_ranks = len(frontier), min(branch, log_probs.shape[1])
    of_children = np.empty(num_rows * num_ranks, np.float32)
    for row in range(num_rows):
        for rank in range(num_ranks):
            of_children[row * num_ranks + rank] = scores[frontier[row]] + log_probs[row, rank]
    enough = _largest(of_children, min(budget, len(of_children)))  # more than `budget` are never needed
    least = max(_largest(scores, budget), enough, least_score)
    places = np.flatnonzero(np.isfinite(of_children) & (of_children >= least))[:room]
    parents, new_tokens = np.empty(len(places), np.intp), np.empty(len(places), np.int32)
    new_log_probs = np.empty(len(places), np.float32)
    for i in range(len(places)):
        row, rank = places[i] // num_ranks, places[i] % num_ranks
        parents[i], new_tokens[i], new_log_probs[i] = frontier[row], tokens[row, rank], log_probs[row, rank]
    return parents, new_tokens, new_log_probs
