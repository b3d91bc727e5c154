"""What a draft has found out below a session's committed tokens: where its model was run, and what may follow there.

Outlives the trees that it was found out for: what of them was accepted need not be run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.model.batch import Segment
from bough.model.kv import KVSlot
from draft_worker.grow import Candidates

UNKNOWN = -2  # the parent of nothing; -1 is that of the first expansion


class Wanted(NamedTuple):
    """Nodes that the model is to be run on; they become expansions when it has been."""

    tokens: NDArray[np.int32]  # (num_new,)
    parents: NDArray[np.int32]  # (num_new,) expansions; -1 for the root
    depths: NDArray[np.int32]  # (num_new,) below the root
    paths: NDArray[np.int32]  # (num_new, width) expansions from the root down, the new ones included; unused places 0


class Explored:
    """Expansions in the order in which the model was run on them. Number i stands in slot row base + i."""

    def __init__(self, base: int) -> None:
        """`base` is the slot row of the root."""
        self.base = base
        self.tokens = np.zeros(0, np.int32)
        self.parents = np.zeros(0, np.int32)
        self.depths = np.zeros(0, np.int32)
        self.paths = np.zeros((0, 1), np.int32)  # as in `Wanted`
        self.candidates = Candidates(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))
        self._index: dict[tuple[int, int], int] = {}  # parent and token -> expansion

    def __len__(self) -> int:
        return len(self.tokens)

    def find(self, parents: NDArray[np.int32], tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """(num_nodes,) the expansions that these tokens are below these parents; -1 where there is none."""
        keys = zip(parents.tolist(), tokens.tolist(), strict=True)
        return np.fromiter((self.child(*key) for key in keys), np.int32, len(tokens))

    def child(self, parent: int, token: int) -> int:
        """The expansion that the token is below this one; -1 where there is none."""
        return self._index.get((parent, token), -1)

    def wanted(self, parents: NDArray[np.int32], tokens: NDArray[np.int32]) -> Wanted:
        """Nodes to run the model on next, given their parents' expansions (-1 for the root)."""
        parents_or_0 = np.maximum(parents, 0)
        is_root = parents < 0
        depths = np.where(is_root, 0, self.depths[parents_or_0] + 1 if len(self) else 0).astype(np.int32)
        paths = np.zeros((len(tokens), max(int(depths.max()) + 1, self.paths.shape[1])), np.int32)
        if len(self):
            paths[:, : self.paths.shape[1]] = np.where(is_root[:, None], 0, self.paths[parents_or_0])
        paths[np.arange(len(tokens)), depths] = len(self) + np.arange(len(tokens))
        return Wanted(tokens, parents, depths, paths)

    def segment(self, slot: KVSlot, wanted: Wanted) -> Segment:
        """The rows of a model pass; parents stand in the slot already."""
        rows = self.base + len(self) + np.arange(len(wanted.tokens), dtype=np.int32)
        width = int(wanted.depths.max()) + 1
        tail = self.base + wanted.paths[:, :width]
        return Segment(slot, wanted.tokens, self.base + wanted.depths, rows, self.base, tail, True)

    def path_tokens(self, wanted: Wanted) -> NDArray[np.int32]:
        """(num_new, width) the tokens from the root down, the new ones included; unused places hold any."""
        tokens: NDArray[np.int32] = np.concatenate((self.tokens, wanted.tokens))[wanted.paths]
        return tokens

    def learn(self, wanted: Wanted, candidates: Candidates) -> None:
        """The model has been run: the nodes are expansions now, and these tokens may follow them."""
        first = len(self)
        keys = zip(wanted.parents.tolist(), wanted.tokens.tolist(), strict=True)
        self._index.update((key, first + i) for i, key in enumerate(keys))
        old = np.pad(self.paths, ((0, 0), (0, wanted.paths.shape[1] - self.paths.shape[1])))
        self.tokens = np.concatenate((self.tokens, wanted.tokens))
        self.parents = np.concatenate((self.parents, wanted.parents))
        self.depths = np.concatenate((self.depths, wanted.depths))
        self.paths = np.concatenate((old, wanted.paths))
        if first == 0:
            self.candidates = candidates
        else:
            both = zip(self.candidates, candidates, strict=True)
            self.candidates = Candidates(*(np.concatenate(pair) for pair in both))

    def following(self, expansions: NDArray[np.int32]) -> Candidates:
        """What may follow these."""
        return Candidates(self.candidates.tokens[expansions], self.candidates.log_probs[expansions])

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """Expansions along these tokens from the root down, as far as there are any."""
        path: list[int] = []
        for token in tokens:
            expansion = self._index.get((path[-1] if path else -1, token))
            if expansion is None:
                break
            path.append(expansion)
        return path

    def below(self, expansion: int, base: int) -> tuple[Explored, NDArray[np.int32]]:
        """What remains when this expansion becomes the root, in slot row `base`, and which of ours that is."""
        depth = int(self.depths[expansion])
        kept = np.flatnonzero((self.depths >= depth) & (self.paths[:, depth] == expansion)).astype(np.int32)
        new_number = np.zeros(len(self), np.int32)
        new_number[kept] = np.arange(len(kept))
        wanted = Wanted(
            self.tokens[kept],
            np.where(kept == expansion, -1, new_number[np.maximum(self.parents[kept], 0)]).astype(np.int32),
            self.depths[kept] - np.int32(depth),
            new_number[self.paths[kept, depth:]],
        )
        explored = Explored(base)
        explored.learn(wanted, self.following(kept))
        return explored, kept
