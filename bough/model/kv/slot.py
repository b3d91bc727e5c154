"""A session's rows and the tokens committed in them, for any content of rows.

Rows [0, length) hold committed tokens at positions of the same numbers; rows of a tree above them do not count until
they are compacted. `bough.model.kv.session_kv` has slots of keys and values; a simulated worker's hold only tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bough.errors import PrefixMissing
from bough.protocol.prefix_hash import prefix_hash
from bough.trees.tree import IntArray, Tree


class Slot:
    """A range of rows for one session, and its committed tokens."""

    def __init__(self) -> None:
        """Make a slot without rows."""
        self.tokens: list[int] = []  # committed: token i is in row i
        self.begin = self.end = 0  # rows of the shared memory
        self.num_in_sweep = 0  # rows behind the committed ones that a sweep in flight writes

    def move(self, begin: int, end: int, num_kept: int) -> None:
        """Assign these rows instead of the slot's own, keeping the contents of the first `num_kept`."""
        self.begin, self.end = begin, end

    @property
    def num_rows(self) -> int:
        """Number of rows, including those for a tree."""
        return self.end - self.begin

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return len(self.tokens)

    def require(self, context_start: int, expected_hash: int) -> None:
        """Check that the first `context_start` tokens are the caller's.

        Raises:
            PrefixMissing: as `require_prefix`.
        """
        require_prefix(self.tokens, context_start, expected_hash)

    def usable(self, length: int) -> int:
        """The most of the first `length` tokens from which a session can continue."""
        return min(length, self.length)

    def snapshot_at(self, lengths: Collection[int]) -> None:
        """Keep the slot usable at these lengths too, if possible."""

    def roll_back(self, length: int) -> None:
        """Drop all but the first `length` tokens, or fewer if fewer are usable."""
        del self.tokens[length:]

    def clear(self) -> None:
        """Drop all contents, when the slot's rows are taken; it must not be used any more."""
        self.tokens.clear()

    def fork(self, source: Slot, length: int) -> None:
        """Copy another slot's tokens from the end of this one's up to `length`, with their rows.

        This slot's tokens must be a prefix of the other's, which must be usable at that length.
        """
        new = range(self.length, length)
        assert new.start < new.stop <= source.length, (
            "a fork copies tokens that the source has committed, and this slot lacks"
        )
        self._copy(source, new)
        self.tokens.extend(source.tokens[new.start : new.stop])

    def compact(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Commit tokens that are in `rows`, moving these rows down behind the committed ones.

        `rows` beyond the tokens are moved too, but not committed.
        """
        if list(rows) != list(range(self.length, self.length + len(rows))):
            self._gather(rows, self.length)
        self.tokens.extend(tokens)

    def _copy(self, source: Slot, rows: range) -> None:
        """Copy the contents of these rows from the same rows of another slot."""

    def _gather(self, rows: Sequence[int], begin: int) -> None:
        """Move the contents of `rows` to the rows from `begin` on."""


def require_prefix(held: Sequence[int], context_start: int, expected_hash: int) -> None:
    """Check that the first `context_start` of the cached tokens are the caller's.

    Raises:
        PrefixMissing: has the length and hash of the cached tokens.
    """
    if context_start > len(held) or prefix_hash(held[:context_start]) != expected_hash:
        found = f"{len(held)} tokens" if context_start > len(held) else "other tokens"
        raise PrefixMissing(
            f"context.context_start: must be tokens that are cached, got {context_start}, but {found} are; "
            "send the session's tokens again from there",
            len(held),
            prefix_hash(held),
        )


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
