"""Hashes of token prefixes, which identify a prefix without sending it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

Tokens = Sequence[int] | NDArray[np.int32]

BLOCK_TOKENS = 32  # tokens in each block of `block_hashes`
CHECKPOINT_TOKENS = 1024  # distance between saved hash states of a history
Holder = TypeVar("Holder", bound=Hashable)


class TokenPrefix(Sequence[int]):
    """An immutable view, without a copy, of the first tokens of a growing history."""

    __slots__ = ("_history", "_length")

    def __init__(self, history: TokenHistory, length: int) -> None:
        self._history, self._length = history, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self._history.read(0, self._length))

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        """A token, a view of a shorter prefix, or a copy of any other slice."""
        if isinstance(index, slice):
            begin, end, step = index.indices(self._length)
            if (begin, step) == (0, 1):
                return TokenPrefix(self._history, end)
            return self._history.read(begin, max(begin, end)) if step == 1 else tuple(self)[index]
        place = range(self._length)[index]
        return self._history.read(place, place + 1)[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """A copy as a NumPy array."""
        return np.asarray(self._history.read(0, self._length), dtype=dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(int.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]  # it equals a tuple, so it would have to hash all tokens

    def prefix_hash(self) -> int:
        """64 bits of BLAKE2b over the tokens as little-endian int32, from the history's saved states."""
        return self._history.prefix_hash(self._length)


class TokenHistory(TokenPrefix):
    """A session's append-only tokens; hashing a prefix reads at most `CHECKPOINT_TOKENS` tokens besides new ones."""

    __slots__ = ("_states", "_tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens = array("i", tokens)
        self._states = [hashlib.blake2b(digest_size=8)]  # [i]: over the first i * CHECKPOINT_TOKENS tokens
        super().__init__(self, len(self._tokens))

    def append(self, token: int) -> None:
        """Append a token."""
        self._tokens.append(token)
        self._length += 1

    def read(self, begin: int, end: int) -> array[int]:
        """A copy of the tokens from `begin` to `end`."""
        return self._tokens[begin:end]

    def prefix_hash(self, length: int | None = None) -> int:
        """Hash of the first `length` tokens, or of all."""
        length = len(self) if length is None else length
        while len(self._states) <= length // CHECKPOINT_TOKENS:
            begin = (len(self._states) - 1) * CHECKPOINT_TOKENS
            self._states.append(self._hashed(self._states[-1], begin, begin + CHECKPOINT_TOKENS))
        checkpoint = length // CHECKPOINT_TOKENS
        return int.from_bytes(
            self._hashed(self._states[checkpoint], checkpoint * CHECKPOINT_TOKENS, length).digest(), "little"
        )

    def _hashed(self, state: hashlib.blake2b, begin: int, end: int) -> hashlib.blake2b:
        """A copy of `state`, updated with the tokens from `begin` to `end`."""
        state = state.copy()
        state.update(_packed(self.read(begin, end)))
        return state


def prefix_hash(tokens: Sequence[int]) -> int:
    """64 bits of BLAKE2b over the tokens as little-endian int32."""
    if isinstance(tokens, TokenPrefix):
        return tokens.prefix_hash()
    return int.from_bytes(hashlib.blake2b(_packed(tokens), digest_size=8).digest(), "little")


def _packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


def block_hashes(tokens: Sequence[int], start: Sequence[int] = (), cache_salt: str = "") -> list[int]:
    """A 64-bit hash for each whole block of `BLOCK_TOKENS` tokens, covering that block and all before it.

    Sequences with the same salt and the same first n blocks have equal n-th hashes. Collisions can be forged, so equal
    hashes only select candidates whose tokens and salts must then be compared. `start` holds known hashes of leading
    blocks, which are not recomputed.
    """
    hashes, data = list(start), np.asarray(tokens[len(start) * BLOCK_TOKENS :], dtype="<i4").tobytes()
    size = 4 * BLOCK_TOKENS
    beginning = hashlib.blake2b(cache_salt.encode(), digest_size=16).digest() if cache_salt else b""
    for begin in range(0, len(data) - size + 1, size):
        before = hashes[-1].to_bytes(8, "little") if hashes else beginning
        digest = hashlib.blake2b(before + data[begin : begin + size], digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "little"))
    return hashes


def whole_blocks(num_tokens: int) -> int:
    """`num_tokens` rounded down to whole blocks.

    Prefixes are shared by whole blocks only: otherwise cached lengths would let a client guess another client's
    prompt token by token.
    """
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def common_length(left: Tokens, right: Tokens) -> int:
    """Length of the common prefix of two sequences."""
    end = min(len(left), len(right))
    differs = np.asarray(left[:end]) != np.asarray(right[:end])
    return int(differs.argmax()) if differs.any() else end


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
