"""The rows of one session and the tokens that are committed in them, whatever stands in the rows.

A slot knows rows, not meanings: rows [0, length) hold committed tokens at the positions of the same numbers, and what a
tree puts above them counts for nothing until it is compacted down. `bough.model.kv.session_kv` has slots of keys and
values; a simulated worker's hold nothing but their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from bough.errors import PrefixMissing
from bough.protocol.prefix_hash import prefix_hash


class Slot:
    """Room for `num_rows` tokens of one session, and the tokens that it holds."""

    def __init__(self) -> None:
        """Without rows."""
        self.tokens: list[int] = []  # committed tokens: row i holds token i
        self.begin = self.end = 0  # rows of the memory that all slots share

    def move(self, begin: int, end: int, num_kept: int) -> None:
        """Gives it these rows instead of those that it had; the contents of the first `num_kept` come along."""
        self.begin, self.end = begin, end

    @property
    def num_rows(self) -> int:
        """Tokens that there is room for, a tree's included."""
        return self.end - self.begin

    @property
    def length(self) -> int:
        """Number of committed tokens held."""
        return len(self.tokens)

    def require(self, context_start: int, expected_hash: int) -> None:
        """That the first `context_start` tokens are the ones that a caller means.

        Raises:
            PrefixMissing: with the length and hash of what is held.
        """
        if context_start > self.length or prefix_hash(self.tokens[:context_start]) != expected_hash:
            held = f"{self.length} tokens" if context_start > self.length else "other tokens"
            raise PrefixMissing(
                f"context.context_start: {context_start} tokens were taken to be held, but {held} are; "
                "send the session's tokens again from what is held",
                self.length,
                prefix_hash(self.tokens),
            )

    def roll_back(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""
        del self.tokens[length:]

    def fork(self, source: Slot, length: int) -> None:
        """Takes over another slot's tokens from where this one's end up to `length`, with what stands in their rows.

        What this slot holds must be the beginning of what the other one does.
        """
        new = range(self.length, length)
        assert new.start < new.stop <= source.length, "a fork takes what the source has committed, and this lacks"
        self._copy(source, new)
        self.tokens.extend(source.tokens[new.start : new.stop])

    def compact(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Commits tokens that stand in `rows`, by moving these down to follow the committed ones.

        What stands in rows beyond the tokens follows them and is not committed.
        """
        if list(rows) != list(range(self.length, self.length + len(rows))):
            self._gather(rows, self.length)
        self.tokens.extend(tokens)

    def _copy(self, source: Slot, rows: range) -> None:
        """Copies the contents of these rows from the same rows of another slot."""

    def _gather(self, rows: Sequence[int], begin: int) -> None:
        """Moves the contents of rows to those from `begin` on."""
