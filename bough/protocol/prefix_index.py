"""Who holds the longest beginning of a text, by hashes of its blocks. Knows no KV: a holder is anything with tokens.

Texts of different salts have no beginning in common, whatever their tokens are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from bough.protocol.prefix_hash import BLOCK_TOKENS, block_hashes

Holder = TypeVar("Holder", bound=Hashable)


class Match(NamedTuple, Generic[Holder]):
    """A holder, and how many leading tokens, in whole blocks, it has in common with what was asked for."""

    holder: Holder
    length: int


class PrefixIndex(Generic[Holder]):
    """Follows the tokens of its holders. A new block costs one hash, a search one look-up per block."""

    def __init__(self) -> None:
        self._tokens: dict[Holder, list[int]] = {}
        self._salts: dict[Holder, str] = {}
        self._hashes: dict[Holder, list[int]] = {}
        self._holders: dict[int, dict[Holder, None]] = {}  # by hash of a block and all before it

    def follow(self, holder: Holder, tokens: list[int], cache_salt: str = "") -> None:
        """These are a holder's tokens now: those of before, cut or gone on with, or all of them under another salt.

        Between a cut and going on from there it must be called too. `tokens` is kept, and not copied.
        """
        if self._salts.get(holder, cache_salt) != cache_salt:
            self.forget(holder)
        self._tokens[holder], self._salts[holder] = tokens, cache_salt
        known = self._hashes.setdefault(holder, [])
        num_blocks = len(tokens) // BLOCK_TOKENS
        for block in known[num_blocks:]:
            self._leave(block, holder)
        del known[num_blocks:]
        if len(known) < num_blocks:
            new = block_hashes(tokens, known, cache_salt)[len(known) :]
            known.extend(new)
            for block in new:
                self._holders.setdefault(block, {})[holder] = None

    def forget(self, holder: Holder) -> None:
        """The holder is gone."""
        for block in self._hashes.pop(holder, ()):
            self._leave(block, holder)
        self._tokens.pop(holder, None)
        self._salts.pop(holder, None)

    def longest(self, tokens: list[int], hashes: Sequence[int], cache_salt: str = "") -> Match[Holder] | None:
        """The longest prefix of whole blocks of `tokens` that a holder of this salt has; None where it is not even one.

        `hashes` are those of the blocks. They say whom to compare with; a match is what the tokens have in common.
        """
        num_blocks = next((n for n, block in enumerate(hashes) if block not in self._holders), len(hashes))
        for n in range(num_blocks, 0, -1):
            wanted = tokens[: n * BLOCK_TOKENS]
            for holder in self._holders[hashes[n - 1]]:
                if self._salts[holder] == cache_salt and self._tokens[holder][: len(wanted)] == wanted:
                    return Match(holder, len(wanted))
        return None

    def check_integrity(self, holders: Sequence[Holder]) -> None:
        """Asserts that these and no others are followed, as far as their tokens go."""
        assert self._tokens.keys() == set(holders), "the index follows others than there are"
        for holder, tokens in self._tokens.items():
            assert len(self._hashes[holder]) == len(tokens) // BLOCK_TOKENS, "the index has lost count of tokens"

    def _leave(self, block: int, holder: Holder) -> None:
        holders = self._holders[block]
        del holders[holder]
        if not holders:
            del self._holders[block]
