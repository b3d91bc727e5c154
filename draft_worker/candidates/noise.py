"""The target's noise for single tokens: selected random numbers of `sampler.gumbel_noise`.

Philox is counter-based: number n of a position is a function of the key and n alone, so nothing is stored. Noise for
a whole vocabulary would take half a megabyte for each level of each session's tree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bough.model.cpu.jit import strict, strict_inner
from bough.model.sampling.sampler import gumbel

# Constants of Philox 4x64 (Salmon et al., 2011): multipliers, and the key's increments from round to round.
MULTIPLIERS = np.array([0xD2E7470EE14C6C93, 0xCA5A826395121157], np.uint64)
KEY_STEPS = np.array([0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B], np.uint64)
NUM_ROUNDS = 10
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def noise_at(seed: int, positions: NDArray[np.int32], tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """Noise (num_nodes, num_considered) of these tokens at the position (num_nodes,) of each row."""
    raw = np.empty(tokens.shape, np.uint64)
    _raw_at(np.uint64(seed), positions.astype(np.uint64), tokens.astype(np.uint64), raw, MULTIPLIERS, KEY_STEPS)
    return gumbel(raw)


@strict_inner
def _high(a: Any, b: Any) -> Any:
    """The upper 64 bits of the 128-bit product."""
    a_low, a_high, b_low, b_high = a & LOW, a >> HALF, b & LOW, b >> HALF
    middle = a_high * b_low + ((a_low * b_low) >> HALF)
    return a_high * b_high + (middle >> HALF) + ((a_low * b_high + (middle & LOW)) >> HALF)


@strict
def _raw_at(seed: Any, positions: Any, tokens: Any, out: Any, multipliers: Any, key_steps: Any) -> Any:
    """Raw random numbers of tokens. Each count, starting with 1, gives four."""
    for row in range(tokens.shape[0]):
        for column in range(tokens.shape[1]):
            token = tokens[row, column]
            c0, c1, c2, c3 = (token >> np.uint64(2)) + np.uint64(1), positions[row], np.uint64(0), np.uint64(0)
            k0, k1 = seed, np.uint64(0)
            for _ in range(NUM_ROUNDS):
                high0, low0 = _high(multipliers[0], c0), multipliers[0] * c0
                high1, low1 = _high(multipliers[1], c2), multipliers[1] * c2
                c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
                k0, k1 = k0 + key_steps[0], k1 + key_steps[1]
            word = token & np.uint64(3)
            out[row, column] = c0 if word == 0 else c1 if word == 1 else c2 if word == 2 else c3
