"""Random numbers as pure functions of keys (splitmix64), the same in any batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def mixed(*parts: int | NDArray[Any]) -> Keys:
    """64-bit keys of whole numbers, given as Python's own or as broadcastable arrays; the order matters."""
    numbers: list[int] = []
    for each in parts:
        if not isinstance(each, int):
            break
        numbers.append(each)
    return _continued(_mixed_numbers(*numbers), parts[len(numbers) :])


def uniforms(keys: Keys) -> NDArray[np.float64]:
    """A uniform number in [0, 1) for each key, from its upper 53 bits."""
    numbers: NDArray[np.float64] = (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def key_of(text: str) -> int:
    """A 64-bit key of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=4096)
def _mixed_numbers(*numbers: int) -> Keys:
    """`mixed` of Python's numbers only; cached, as most keys begin with the same few."""
    key = _continued(np.zeros((), np.uint64), numbers)
    key.setflags(write=False)
    return key


def _continued(key: Keys, parts: Sequence[int | NDArray[Any]]) -> Keys:
    """A key with more parts mixed in."""
    with np.errstate(over="ignore"):
        for each in parts:
            key = _splitmix((key ^ _as_keys(each)) + _GOLDEN)
    return key


def _as_keys(values: int | NDArray[Any]) -> Keys:
    return np.asarray(values % 2**64 if isinstance(values, int) else values).astype(np.uint64)


def _splitmix(keys: Keys) -> Keys:
    """The finaliser of splitmix64 (Steele, Lea and Flood), a bijection of 64 bits."""
    keys = (keys ^ (keys >> np.uint64(30))) * _FIRST
    keys = (keys ^ (keys >> np.uint64(27))) * _SECOND
    return np.asarray(keys ^ (keys >> np.uint64(31)), np.uint64)
