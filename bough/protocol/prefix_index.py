"""An index of holders (such as KV slots) by the block hashes of their tokens, to find the longest shared prefix.

Holders with different salts share no prefix.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from bough.protocol.prefix_hash import BLOCK_TOKENS, block_hashes

Holder = TypeVar("Holder", bound=Hashable)


class PrefixMatch(NamedTuple, Generic[Holder]):
    """A holder, and the length in tokens of the prefix it shares, in whole blocks."""

    holder: Holder
    length: int


class PrefixIndex(Generic[Holder]):
    """Tracks the tokens of holders. A new block costs one hash, a search one look-up for each block."""

    def __init__(self) -> None:
        self._tokens: dict[Holder, list[int]] = {}
        self._salts: dict[Holder, str] = {}
        self._hashes: dict[Holder, list[int]] = {}
        self._holders: dict[int, dict[Holder, None]] = {}  # by block hash

    def follow(self, holder: Holder, tokens: list[int], cache_salt: str = "") -> None:
        """Update a holder's tokens: truncated or extended since the last call, or under a new salt.

        Call it between truncating and extending. `tokens` is kept by reference.
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
        """Remove a holder."""
        for block in self._hashes.pop(holder, ()):
            self._leave(block, holder)
        self._tokens.pop(holder, None)
        self._salts.pop(holder, None)

    def longest(self, tokens: list[int], hashes: Sequence[int], cache_salt: str = "") -> PrefixMatch[Holder] | None:
        """The holder of this salt with the longest common prefix of whole blocks, or None if no block is shared.

        `hashes` are the block hashes of `tokens`. They select candidates; the tokens themselves are compared.
        """
        num_blocks = next((n for n, block in enumerate(hashes) if block not in self._holders), len(hashes))
        for n in range(num_blocks, 0, -1):
            prefix = tokens[: n * BLOCK_TOKENS]
            for holder in self._holders[hashes[n - 1]]:
                if self._salts[holder] == cache_salt and self._tokens[holder][: len(prefix)] == prefix:
                    return PrefixMatch(holder, len(prefix))
        return None

    def check_integrity(self, holders: Sequence[Holder]) -> None:
        """Assert that exactly these holders are tracked, each with a hash for every whole block."""
        assert self._tokens.keys() == set(holders), "the index tracks other holders than exist"
        for holder, tokens in self._tokens.items():
            assert len(self._hashes[holder]) == len(tokens) // BLOCK_TOKENS, "the index misses blocks of a holder"

    def _leave(self, block: int, holder: Holder) -> None:
        holders = self._holders[block]
        del holders[holder]
        if not holders:
            del self._holders[block]
