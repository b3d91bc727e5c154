"""Growing a tree of guesses without a model: growers name the nodes to expand, and are given candidates."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bough.trees.tree import Tree

NO_NODES = np.zeros(0, np.intp)


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
