"""What a draft has found out below a session's committed tokens: where its model was run, and what may follow there.

Outlives the trees that it was found out for: what of them was accepted need not be run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.model.batch import Segment
from bough.model.kv import KVSlot
from draft_worker import links
from draft_worker.grow import Candidates

ROOM = 64  # expansions that there is room for from the first on


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
        self._num = 0  # of rows in the arrays, which have room to spare
        self._tokens, self._parents, self._depths = (np.zeros(0, np.int32) for _ in range(3))
        self._paths = np.zeros((0, 1), np.int32)  # as in `Wanted`
        self._candidates = Candidates(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))
        self._first, self._following = np.zeros(1, np.int32), np.zeros(0, np.int32)  # as `draft_worker.links` has them

    def __len__(self) -> int:
        return self._num

    @property
    def depths(self) -> NDArray[np.int32]:
        """(num_expansions,) below the root."""
        return self._depths[: self._num]

    def find(self, parents: NDArray[np.int32], tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """(num_nodes,) the expansions that these tokens are below these parents; -1 where there is none."""
        found = np.empty(len(tokens), np.int32)
        links.find(self._first, self._following, self._tokens, parents, tokens, found)
        return found

    def find_tree(self, parents: NDArray[np.int32], tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """(num_nodes,) the expansions that a tree's nodes are; -1 where the model has not been run."""
        found = np.empty(len(tokens), np.int32)
        links.find_tree(self._first, self._following, self._tokens, parents, tokens, found)
        return found

    def wanted(self, parents: NDArray[np.int32], tokens: NDArray[np.int32]) -> Wanted:
        """Nodes to run the model on next, given their parents' expansions (-1 for the root)."""
        parents_or_0 = np.maximum(parents, 0)
        is_root = parents < 0
        depths = np.where(is_root, 0, self.depths[parents_or_0] + 1 if len(self) else 0).astype(np.int32)
        paths, known = np.zeros((len(tokens), int(depths.max()) + 1), np.int32), self._paths
        if len(self):
            width = min(paths.shape[1], known.shape[1])
            paths[:, :width] = np.where(is_root[:, None], 0, known[parents_or_0, :width])
        paths[np.arange(len(tokens)), depths] = len(self) + np.arange(len(tokens))
        return Wanted(tokens, parents, depths, paths)

    def segment(self, slot: KVSlot, wanted: Wanted) -> Segment:
        """The rows of a model pass; parents stand in the slot already."""
        rows = self.base + len(self) + np.arange(len(wanted.tokens), dtype=np.int32)
        assert rows[-1] < slot.num_rows, "kernels write wherever they are told to"
        return Segment(slot, wanted.tokens, self.base + wanted.depths, rows, self.base, self.base + wanted.paths, True)

    def path_tokens(self, wanted: Wanted) -> NDArray[np.int32]:
        """(num_new, width) the tokens from the root down, the new ones included; unused places hold any."""
        tokens: NDArray[np.int32] = np.concatenate((self._tokens[: len(self)], wanted.tokens))[wanted.paths]
        return tokens

    def learn(self, wanted: Wanted, candidates: Candidates) -> None:
        """The model has been run: the nodes are expansions now, and these tokens may follow them."""
        first, self._num = len(self), len(self) + len(wanted.tokens)
        self._tokens = _put(self._tokens, first, wanted.tokens)
        self._parents = _put(self._parents, first, wanted.parents)
        self._depths = _put(self._depths, first, wanted.depths)
        self._paths = _put(self._paths, first, wanted.paths)
        self._first = _put(self._first, 1 + first, np.zeros_like(wanted.tokens))
        self._following = _put(self._following, first, np.zeros_like(wanted.tokens))
        links.link(self._first, self._following, wanted.parents, first)
        assert first == 0 or candidates.tokens.shape[1] == self._candidates.tokens.shape[1], "0 would be certainty"
        both = zip(self._candidates, candidates, strict=True)
        self._candidates = Candidates(*(_put(held, first, new) for held, new in both))

    def following(self, expansions: NDArray[np.int32]) -> Candidates:
        """What may follow these."""
        return Candidates(self._candidates.tokens[expansions], self._candidates.log_probs[expansions])

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """Expansions along these tokens from the root down, as far as there are any."""
        chain = np.arange(-1, len(tokens) - 1, dtype=np.int32)
        found = self.find_tree(chain, np.asarray(tokens, np.int32))
        path: list[int] = found[found >= 0].tolist()  # below what is not there there is nothing
        return path

    def below(self, expansion: int, base: int) -> tuple[Explored, NDArray[np.int32]]:
        """What remains when this expansion becomes the root, in slot row `base`, and which of ours that is."""
        depth, paths = int(self.depths[expansion]), self._paths[: len(self)]
        kept = np.flatnonzero((self.depths >= depth) & (paths[:, depth] == expansion)).astype(np.int32)
        new_number = np.zeros(len(self), np.int32)
        new_number[kept] = np.arange(len(kept))
        wanted = Wanted(
            self._tokens[kept],
            np.where(kept == expansion, -1, new_number[np.maximum(self._parents[kept], 0)]).astype(np.int32),
            self.depths[kept] - np.int32(depth),
            new_number[paths[kept, depth:]],
        )
        explored = Explored(base)
        explored.learn(wanted, self.following(kept))
        return explored, kept


def _put(held: NDArray[Any], first: int, new: NDArray[Any]) -> NDArray[Any]:
    """The array with new rows from number `first` on: itself, or where it is too small one at least twice as large."""
    end, columns = first + len(new), new.shape[1:]
    if len(held) < end or held.shape[1:] < columns:
        wanted = (max(end, ROOM), *columns)
        larger = [have if have >= want else max(want, 2 * have) for have, want in zip(held.shape, wanted, strict=True)]
        before, held = held, np.zeros(larger, held.dtype)
        held[tuple(map(slice, before.shape))] = before
    if columns:
        held[first:end, : columns[0]] = new
    else:
        held[first:end] = new
    return held
