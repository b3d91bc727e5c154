"""Names a prefix of a session's tokens without sending it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

Tokens = Sequence[int] | NDArray[np.int32]

BLOCK_TOKENS = 32  # tokens that `block_hashes` names together
MARK_TOKENS = 1024  # between two places of a history at which the state of its hash is remembered


class TokenPrefix(Sequence[int]):
    """The first tokens of a history. It stays what it is while the history grows, and copies nothing."""

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
        """A token, another prefix, or a copy of the tokens in between."""
        if isinstance(index, slice):
            begin, end, step = index.indices(self._length)
            if (begin, step) == (0, 1):
                return TokenPrefix(self._history, end)
            return self._history.read(begin, max(begin, end)) if step == 1 else tuple(self)[index]
        place = range(self._length)[index]
        return self._history.read(place, place + 1)[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """A copy of all of them, as NumPy asks for it."""
        return np.asarray(self._history.read(0, self._length), dtype=dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(int.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]  # equal to a tuple, whose hash would take all of the tokens

    def prefix_hash(self) -> int:
        """As the function of that name, by what the history remembers."""
        return self._history.prefix_hash(self._length)


class TokenHistory(TokenPrefix):
    """The tokens of a session, which grow and never change.

    A hash of a prefix takes work by at most `MARK_TOKENS` tokens, and by those that are new, however long it is.
    """

    __slots__ = ("_marks", "_tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens = array("i", tokens)
        self._marks = [hashlib.blake2b(digest_size=8)]  # over so many times MARK_TOKENS tokens
        super().__init__(self, len(self._tokens))

    def append(self, token: int) -> None:
        """One more."""
        self._tokens.append(token)
        self._length += 1

    def read(self, begin: int, end: int) -> array[int]:
        """A copy of the tokens from one place to another: all that is ever read of them."""
        return self._tokens[begin:end]

    def prefix_hash(self, length: int | None = None) -> int:
        """Of the first so many tokens, or of all."""
        length = len(self) if length is None else length
        while len(self._marks) <= length // MARK_TOKENS:
            begin = (len(self._marks) - 1) * MARK_TOKENS
            self._marks.append(self._hashed(self._marks[-1], begin, begin + MARK_TOKENS))
        mark = length // MARK_TOKENS
        return int.from_bytes(self._hashed(self._marks[mark], mark * MARK_TOKENS, length).digest(), "little")

    def _hashed(self, state: hashlib.blake2b, begin: int, end: int) -> hashlib.blake2b:
        """A hash that has gone on with these tokens."""
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
    """One hash for each whole block of `BLOCK_TOKENS` tokens: of that block and of all before it.

    Where two sequences have their first n blocks in common, and the same salt, their n-th hashes are equal. Hashes of
    64 bits without a key can be made to collide: equal hashes only say where to compare tokens and salts. `start` are
    hashes of leading blocks that are known already; they are not computed again.
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
    """So many tokens, down to the end of a whole block.

    What one session learns of another's text goes by whole blocks: token by token a stranger could guess its way
    along somebody's prompt, and see each right guess.
    """
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def common_length(left: Tokens, right: Tokens, start: int = 0) -> int:
    """Leading tokens that two sequences have in common; the first `start` are known to be."""
    end = min(len(left), len(right))
    differs = np.asarray(left[start:end]) != np.asarray(right[start:end])
    return start + int(differs.argmax()) if differs.any() else end
