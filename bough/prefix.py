"""Names a prefix of a session's tokens without sending it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Tokens = Sequence[int] | NDArray[np.int32]

BLOCK_TOKENS = 32  # tokens that `block_hashes` names together


def prefix_hash(tokens: Sequence[int]) -> int:
    """64 bits of BLAKE2b over the tokens as little-endian int32."""
    data = np.asarray(tokens, dtype="<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def block_hashes(tokens: Sequence[int], start: Sequence[int] = ()) -> list[int]:
    """One hash for each whole block of `BLOCK_TOKENS` tokens: of that block and of all before it.

    Where two sequences have their first n blocks in common, their n-th hashes are equal. Hashes of 64 bits without a
    key can be made to collide: equal hashes only say where to compare the tokens. `start` are hashes of leading
    blocks that are known already; they are not computed again.
    """
    hashes, data = list(start), np.asarray(tokens[len(start) * BLOCK_TOKENS :], dtype="<i4").tobytes()
    size = 4 * BLOCK_TOKENS
    for begin in range(0, len(data) - size + 1, size):
        before = hashes[-1].to_bytes(8, "little") if hashes else b""
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
