"""Grows a tree from cached expansions; the model is needed only for nodes that are not cached."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draft_worker.expansions.expansion_cache import ExpansionCache
from draft_worker.growth.grower import NO_NODES, Grower


class CachedGrowth:
    """Runs a grower as far as the cache reaches; `missing` are then the nodes to run the model on."""

    def __init__(self, grower: Grower, explored: ExpansionCache, root_parent: int = -1) -> None:
        """The grower's root is below the expansion `root_parent`; -1 if it is the session's root."""
        self.grower = grower
        self.num_warm = 0  # nodes that were cached when first needed
        self._explored, self._root_parent = explored, root_parent
        self._frontier = NO_NODES
        self._is_counted = False

    def advance(self) -> bool:
        """Grow from the cache; True if the model is needed, False if the tree is done."""
        while True:
            if len(self._frontier) == 0:
                self._frontier, self._is_counted = self.grower.frontier(), False
            if len(self._frontier) == 0:
                return False
            expansions = self._explored.find(*self._places(self._frontier))
            is_known = expansions >= 0
            if not self._is_counted:
                self.num_warm += int(is_known.sum())
                self._is_counted = True
            if not is_known.all():
                self._missing = self._frontier[~is_known]
                return True
            self.grower.tree.expansions[self._frontier] = expansions
            self.grower.take(self._frontier, self._explored.following(expansions))
            self._frontier = NO_NODES

    def missing(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Parents' expansions and tokens, each (num_missing,), of the nodes to run the model on."""
        return self._places(self._missing)

    def _places(self, nodes: NDArray[np.intp]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        tree = self.grower.tree
        above = np.where(nodes == 0, np.int32(self._root_parent), tree.expansions[tree.parents[nodes]])
        return above, tree.tokens[nodes]
