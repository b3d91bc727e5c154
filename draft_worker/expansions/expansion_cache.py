"""The nodes below a session's committed tokens on which the draft was run, and their candidates.

It outlives the trees: accepted nodes need not be run again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.model.kv.slot import Segment, Slot
from draft_worker.candidates.candidates import scaled
from draft_worker.growth.grower import NO_NODES, Candidates, Grower

ROOM, LEVELS = 64, 8  # initial capacity, in expansions and levels


class PendingExpansions(NamedTuple):
    """Nodes to run the model on, which then become expansions. Valid until others are requested."""

    tokens: NDArray[np.int32]  # (num_new,)
    parents: NDArray[np.int32]  # (num_new,) expansions; -1 for the root
    depths: NDArray[np.int32]  # (num_new,) below the root
    paths: NDArray[np.int32]  # (num_new, width) expansions from the root down to the node itself; unused places 0


class ExpansionCache:
    """Expansions in the order in which the model was run on them. Number i is in slot row base + i."""

    def __init__(self, base: int) -> None:
        """`base` is the slot row of the root."""
        self.base = base
        self.power = 1.0  # exponent of the draft's probabilities (`draft_worker.candidates.candidates`)
        self._num = 0  # used part of the arrays
        self._tokens, self._parents, self._depths = (np.zeros(ROOM, np.int32) for _ in range(3))
        self._index: dict[int, int] = {}  # expansions by `_key` of parent and token
        self._paths = np.zeros((ROOM, LEVELS), np.int32)  # as in `PendingExpansions`
        self._candidates = Candidates(np.zeros((ROOM, 0), np.int32), np.zeros((ROOM, 0), np.float32))

    def __len__(self) -> int:
        return self._num

    @property
    def depths(self) -> NDArray[np.int32]:
        """(num_expansions,) below the root."""
        return self._depths[: self._num]

    def find(self, parents: NDArray[np.int32], tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Expansions (num_nodes,) of these tokens below these parents; -1 if there is none."""
        return np.array([self._index.get(key, -1) for key in _key(parents, tokens).tolist()], np.int32)

    def find_tree(self, parents: NDArray[np.int32], tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Expansions (num_nodes,) of a tree's nodes; -1 if the model was not run."""
        found: list[int] = []
        for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True):
            above = -1 if parent < 0 else found[parent]
            found.append(self._index.get(_key(above, token), -1) if parent < 0 or above >= 0 else -1)
        return np.array(found, np.int32)

    def wanted(self, parents: NDArray[np.int32], tokens: NDArray[np.int32]) -> PendingExpansions:
        """Nodes to run the model on next, given their parents' expansions (-1 for the root)."""
        new = slice(self._num, self._num + len(tokens))
        depths = np.where(parents < 0, 0, self._depths[parents] + 1)
        levels = int(depths.max(initial=-1)) + 1
        self._make_room(new.stop, levels)
        paths = np.where(np.arange(levels) < depths[:, None], self._paths[parents, :levels], 0)
        paths[np.arange(len(depths)), depths] = np.arange(new.start, new.stop)
        return self._put(new, tokens, parents, depths, paths)

    def _put(self, new: slice, *parts: NDArray[np.integer[Any]]) -> PendingExpansions:
        """Store the fields of `PendingExpansions`."""
        tokens, parents, depths, paths = parts
        levels = paths.shape[1]
        self._tokens[new], self._parents[new], self._depths[new] = tokens, parents, depths
        self._paths[new, :levels] = paths
        self._paths[new, levels:] = 0
        return PendingExpansions(self._tokens[new], self._parents[new], self._depths[new], self._paths[new, :levels])

    def _make_room(self, num: int, num_levels: int) -> None:
        """Grow the arrays to at least this capacity, and at least to double their size."""
        room, levels = (
            have if have >= want else max(want, 2 * have)
            for have, want in zip(self._paths.shape, (num, num_levels), strict=True)
        )
        if (room, levels) == self._paths.shape:
            return
        self._tokens, self._parents, self._depths = (
            _grown(held, room) for held in (self._tokens, self._parents, self._depths)
        )
        self._paths = _grown(self._paths, room, levels)
        self._candidates = Candidates(*(_grown(held, room, held.shape[1]) for held in self._candidates))

    def segment(self, slot: Slot, wanted: PendingExpansions) -> Segment:
        """The rows of a model pass over these nodes, whose parents are in the slot already."""
        rows = self.base + len(self) + np.arange(len(wanted.tokens), dtype=np.int32)
        assert rows[-1] < slot.num_rows, "kernels do not check their row numbers"
        return Segment(slot, wanted.tokens, self.base + wanted.depths, rows, self.base, self.base + wanted.paths, True)

    def path_tokens(self, wanted: PendingExpansions) -> NDArray[np.int32]:
        """Tokens (num_new, width) from the root down to each node itself; unused places are arbitrary."""
        return self._tokens[wanted.paths]

    def learn(self, wanted: PendingExpansions, candidates: Candidates) -> None:
        """Store the candidates of the nodes requested last, which become expansions."""
        new = slice(self._num, self._num + len(wanted.tokens))
        self._num = new.stop
        self._index.update(zip(_key(wanted.parents, wanted.tokens).tolist(), range(new.start, new.stop), strict=True))
        width = candidates.tokens.shape[1]
        if new.start == 0:
            self._candidates = Candidates(*(_grown(held, len(self._tokens), width) for held in self._candidates))
        assert width == self._candidates.tokens.shape[1], "padding with 0 would mean certainty"
        for held, own in zip(self._candidates, candidates, strict=True):
            held[new] = own

    def raw_candidates(self, expansions: NDArray[np.int32]) -> Candidates:
        """The draft's candidates after these expansions, unscaled."""
        return Candidates(self._candidates.tokens[expansions], self._candidates.log_probs[expansions])

    def following(self, expansions: NDArray[np.int32]) -> Candidates:
        """Candidates after these expansions, with scaled probabilities."""
        raw = self.raw_candidates(expansions)
        return Candidates(raw.tokens, scaled(raw.log_probs, self.power))

    def below(self, expansion: int, base: int) -> tuple[ExpansionCache, NDArray[np.int32]]:
        """The cache below an expansion, which becomes the root in slot row `base`, and its expansions' numbers here."""
        depth, paths = int(self.depths[expansion]), self._paths[: len(self)]
        kept = np.flatnonzero((self.depths >= depth) & (paths[:, depth] == expansion)).astype(np.int32)
        new_number = np.zeros(len(self), np.int32)
        new_number[kept] = np.arange(len(kept))
        parents = np.where(kept == expansion, -1, new_number[np.maximum(self._parents[kept], 0)]).astype(np.int32)
        depths = self.depths[kept] - depth
        levels = int(depths.max()) + 1
        own_paths = np.where(np.arange(levels) <= depths[:, None], new_number[paths[kept, depth : depth + levels]], 0)
        explored = ExpansionCache(base)
        explored._make_room(len(kept), levels)
        wanted = explored._put(slice(0, len(kept)), self._tokens[kept], parents, depths, own_paths)
        explored.learn(wanted, self.raw_candidates(kept))
        return explored, kept


def _key(parents: Any, tokens: Any) -> Any:
    """A number for each pair of a parent and a token."""
    return ((parents + np.int64(1)) << 32) + tokens


def _grown(held: NDArray[Any], *shape: int) -> NDArray[Any]:
    """The array with a larger shape, padded with 0."""
    larger = np.zeros(shape, held.dtype)
    larger[tuple(map(slice, held.shape))] = held
    return larger


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
