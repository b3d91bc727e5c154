"""Rows of one session in a model pass, before anything is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bough.model.kv.slot import Slot
from bough.trees.tree import IntArray, Tree


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows of one session.

    The key at position p on a row's path stands in slot row p where p < base, else in its tail.
    """

    slot: Slot
    tokens: IntArray  # (num_tokens,)
    positions: IntArray  # (num_tokens,) absolute
    rows: IntArray  # (num_tokens,) slot rows that take the keys and values
    base: int
    tail: IntArray  # (num_tokens, width): [i, j] is the slot row of the key at position base + j on the path to token i
    wants_logits: bool

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def context(cls, slot: Slot, start: int, tokens: Sequence[int]) -> Segment:
        """Tokens in a row from position `start`, to be held and not asked for logits."""
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        no_tail = np.zeros((len(tokens), 0), dtype=np.int32)
        return cls(slot, np.asarray(tokens, np.int32), positions, positions, start + len(tokens), no_tail, False)

    @classmethod
    def tree(cls, slot: Slot, base: int, tree: Tree) -> Segment:
        """A whole tree whose root is at position `base`; node i takes slot row base + i."""
        positions = base + tree.depths()
        rows = base + np.arange(len(tree), dtype=np.int32)
        return cls(slot, tree.tokens, positions, rows, base, base + tree.path_table(), True)

    def part(self, begin: int, end: int) -> Segment:
        """Rows [begin, end) of it."""
        cut = slice(begin, end)
        return Segment(
            self.slot,
            self.tokens[cut],
            self.positions[cut],
            self.rows[cut],
            self.base,
            self.tail[cut],
            self.wants_logits,
        )
