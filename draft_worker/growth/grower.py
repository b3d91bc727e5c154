"""Growing a tree of guesses, apart from any model: growers say which nodes to expand, and are told what may follow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bough.trees.tree import Tree

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
        self.scores[new], self.depths[new] = self.scores[parents] + log_probs, self.depths[parents] + 1
        self.num_nodes = new.stop
        return np.arange(new.start, new.stop)

    def expanded_along(self, tokens: Sequence[int]) -> list[int]:
        """Expansions of the root and of the nodes along these tokens below it, as far as they were expanded."""
        parents, held = self.parents[: self.num_nodes], self.tokens[: self.num_nodes]
        path = [0]
        for token in tokens:
            below = np.flatnonzero((parents == path[-1]) & (held == token))
            if len(below) == 0:
                break
            path.append(int(below[0]))
        return [*takewhile(lambda expansion: expansion >= 0, self.expansions[path].tolist())]

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
