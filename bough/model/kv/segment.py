"""Rows of one session in a model pass, independent of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bough.model.kv.slot import Slot
from bough.trees.tree import IntArray, Tree


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows of one session.

    The key at position p on a row's path is in slot row p if p < base, otherwise in the row that the tail gives.
    """

    slot: Slot
    tokens: IntArray  # (num_tokens,)
    positions: IntArray  # (num_tokens,) absolute
    rows: IntArray  # (num_tokens,) slot rows where keys and values are written
    base: int
    tail: IntArray  # (num_tokens, width): [i, j] is the slot row of position base + j on the path to token i
    wants_logits: bool

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def context(cls, slot: Slot, start: int, tokens: Sequence[int]) -> Segment:
        """Consecutive tokens from position `start`, without logits."""
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        no_tail = np.zeros((len(tokens), 0), dtype=np.int32)
        return cls(slot, np.asarray(tokens, np.int32), positions, positions, start + len(tokens), no_tail, False)

    @classmethod
    def tree(cls, slot: Slot, base: int, tree: Tree) -> Segment:
        """A tree whose root is at position `base`; node i is in slot row base + i."""
        positions = base + tree.depths()
        rows = base + np.arange(len(tree), dtype=np.int32)
        return cls(slot, tree.tokens, positions, rows, base, base + tree.path_table(), True)

    def part(self, begin: int, end: int) -> Segment:
        """Rows [begin, end) of the segment."""
        names = "tokens", "positions", "rows", "tail"
        return replace(self, **{name: getattr(self, name)[begin:end] for name in names})
