"""A tree being grown over what has been found out already: the model is asked only for what is not known yet."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draft_worker.expansions.expansion_cache import ExpansionCache
from draft_worker.growth.grower import NO_NODES, Grower


class CachedGrowth:
    """Takes a grower as far as what is explored reaches; `missing` is then what to run the model on."""

    def __init__(self, grower: Grower, explored: ExpansionCache, root_parent: int = -1) -> None:
        """The grower's root stands below the expansion `root_parent`; -1 where it is the session's root."""
        self.grower = grower
        self.num_warm = 0  # nodes that were known when they were asked for
        self._explored, self._root_parent = explored, root_parent
        self._frontier = NO_NODES
        self._is_counted = False

    def advance(self) -> bool:
        """Whether there is more to grow, for which the model is needed."""
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
        """Parents' expansions and tokens of the nodes that the model is needed for, each (num_missing,)."""
        return self._places(self._missing)

    def _places(self, nodes: NDArray[np.intp]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        tree = self.grower.tree
        above = np.where(nodes == 0, np.int32(self._root_parent), tree.expansions[tree.parents[nodes]])
        return above, tree.tokens[nodes]
