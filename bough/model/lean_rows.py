"""What a Llama-like layer does with each row by itself: norms, positions, gates. For compiled code.

Rows are the lanes of vectors, LANES in a block. `is_few` says that there is one block of few rows, which no thread is
worth: it has forms of its own, in which the compiler may round otherwise. So whoever wants a row's bits to depend on
the row alone never says so.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from bough.model.numbers import exp_below_zero, rounded, widened
from bough.model.tiles import lay_out
from bough.model.vectors import LANES

Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]  # of bfloat16
Words = NDArray[np.int32]  # of two

FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
compiled = numba.njit(fastmath=FASTMATH, cache=True, error_model="numpy", nogil=True)
parallel = numba.njit(fastmath=FASTMATH, cache=True, error_model="numpy", nogil=True, parallel=True)


@compiled
def _word(low, high):  # type: ignore[no-untyped-def]
    return np.int32(np.uint32(rounded(low)) | np.uint32(rounded(high)) << np.uint32(16))


@parallel
def spread(rows, hidden):  # type: ignore[no-untyped-def]
    """Rows of bfloat16's bits as float32 in blocks of LANES; lanes beyond the last row are 0."""
    for block in numba.prange(len(hidden)):
        for lane in range(LANES):
            row = block * LANES + lane
            for i in range(rows.shape[1]):
                hidden[block, i, lane] = widened(rows[row, i]) if row < len(rows) else 0


@parallel
def collect(hidden, rows):  # type: ignore[no-untyped-def]
    """The other way round, rounded."""
    for row in numba.prange(len(rows)):
        here, lane = hidden[row // LANES], row % LANES
        for i in range(rows.shape[1]):
            rows[row, i] = rounded(here[i, lane])


@compiled
def _normalise_block(hidden, weight, epsilon, words):  # type: ignore[no-untyped-def]
    """RMS norm (arXiv 1910.07467) of a block."""
    factors = np.zeros(LANES, np.float32)
    for i in range(len(weight)):
        for lane in range(LANES):
            factors[lane] += hidden[i, lane] * hidden[i, lane]
    for lane in range(LANES):
        factors[lane] = np.float32(1) / np.sqrt(factors[lane] / np.float32(len(weight)) + epsilon)
    for word in range(len(words)):
        low, high = weight[2 * word], weight[2 * word + 1]
        for lane in range(LANES):
            factor = factors[lane]
            first, second = hidden[2 * word, lane] * factor * low, hidden[2 * word + 1, lane] * factor * high
            words[word, lane] = _word(first, second)


@parallel
def _normalise_blocks(hidden, weight, epsilon, words):  # type: ignore[no-untyped-def]
    for block in numba.prange(len(hidden)):
        _normalise_block(hidden[block], weight, epsilon, words[block])


@compiled
def normalise(is_few, hidden, weight, epsilon, words):  # type: ignore[no-untyped-def]
    """Words (blocks, hidden / 2, LANES) of the norm of hidden (blocks, hidden, LANES)."""
    if is_few:
        _normalise_block(hidden[0], weight, epsilon, words[0])
    else:
        _normalise_blocks(hidden, weight, epsilon, words)


@compiled
def rotate(head, norm, epsilon, cos, sin, out):  # type: ignore[no-untyped-def]
    """A query's or key's own norm, where there is one, then its position (arXiv 2104.09864), as bits of bfloat16."""
    half = len(head) // 2
    if len(norm):
        total = np.float32(0)
        for d in range(len(head)):
            total += head[d] * head[d]
        factor = np.float32(1) / np.sqrt(total / np.float32(len(head)) + epsilon)
        for d in range(len(head)):
            head[d] *= factor * norm[d]
    for d in range(half):
        out[d] = rounded(head[d] * cos[d] - head[d + half] * sin[d])
    for d in range(half):
        out[d + half] = rounded(head[d + half] * cos[d + half] + head[d] * sin[d + half])


@parallel
def _lay_out_blocks(words, blocks):  # type: ignore[no-untyped-def]
    for block in numba.prange(len(blocks)):
        lay_out(words, block, blocks)


@compiled
def lay_out_rows(is_few, words, blocks):  # type: ignore[no-untyped-def]
    """Rows (rows, words) in blocks (blocks, words, LANES)."""
    if is_few:
        lay_out(words, 0, blocks)
    else:
        _lay_out_blocks(words, blocks)


@compiled
def gate_words(gate, up, begin, end, gated):  # type: ignore[no-untyped-def]
    """gated = silu(gate) * up, for words [begin, end) of a block."""
    for word in range(begin, end):
        for lane in range(LANES):
            gated[word, lane] = _word(
                _silu(gate[2 * word, lane]) * up[2 * word, lane],
                _silu(gate[2 * word + 1, lane]) * up[2 * word + 1, lane],
            )


@compiled
def _silu(x):  # type: ignore[no-untyped-def]
    power = exp_below_zero(-abs(x))
    return x * (np.float32(1) if x > 0 else power) / (np.float32(1) + power)
