"""Operands of matrix products in compiled layers: rows in blocks of LANES, and matrices, in 16 or 8 bits.

In 16 bits, rows are (blocks, words, LANES) int32, two bfloat16 a word, and matrices (outputs, inputs) of bfloat16's
bits, as in a checkpoint. In 8 bits, there is a scale for each line of LINE numbers of a row and for each output:

- rows (blocks, lines * LINE_WORDS, LANES) uint32: for each line, LINE / 4 words of four signed codes, then the bits of
  the scale as float32, and an int32 that compensates for the offset ZERO in the matrix;
- matrices (groups, inputs / 4 + 1, LANES) int32: outputs are lanes. Each group has words of four unsigned codes, where
  ZERO stands for 0, then the bits of the scales.

The functions are for compiled code only.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.extending import overload

from bough.model.cpu.gemm import LINE_BYTES
from bough.model.cpu.jit import strict_inner
from bough.model.cpu.llvm_vectors import LANES, MOST_SIGNED
from bough.model.cpu.simd import all_lanes, larger, load, magnitude, nearest, pair, store, where_positive

LINE = LINE_BYTES  # numbers that share a scale in 8 bits
MOST = 127  # largest magnitude of a matrix's code, counted from ZERO
ZERO = 128  # offset of a matrix's codes: one factor of the byte-product instructions is unsigned
LINE_WORDS = LINE // 4 + 2


def are_codes(rows: Any) -> bool:
    """Whether rows are in 8 bits, by their numba type."""
    return bool(rows.dtype == numba.types.uint32)


def is_int8(matrix: Any) -> bool:
    """Whether a matrix, or a stack of them, is in 8 bits, by its numba type."""
    return bool(matrix.dtype == numba.types.int32)


@strict_inner
def _put_words(values: Any, words: Any) -> Any:
    for word in range(len(values) // 2):
        store(words, word, pair(load(values, 2 * word), load(values, 2 * word + 1)))


@strict_inner
def _put_codes(values: Any, words: Any) -> Any:
    """Quantise a line of numbers, (LINE, LANES), to LINE_WORDS words."""
    zero, peak = all_lanes(np.float32(0)), _peak_of(values)
    factor = where_positive(peak, all_lanes(np.float32(MOST_SIGNED)) / peak, zero)
    total, lowest = all_lanes(np.int32(0)), all_lanes(np.int32(0xFF))
    for word in range(LINE // 4):
        packed = all_lanes(np.int32(0))
        for byte in range(4):
            code = nearest(load(values, 4 * word + byte) * factor)
            packed, total = packed | (code & lowest) << all_lanes(np.int32(8 * byte)), total + code
        store(words, word, packed)
    store(words, LINE // 4, peak / all_lanes(np.float32(MOST_SIGNED)))
    store(words, LINE // 4 + 1, total * all_lanes(np.int32(-ZERO)))


@strict_inner
def _peak_of(values: Any) -> Any:
    """The magnitude that the largest code represents, by lane."""
    peak = all_lanes(np.float32(0))
    for number in range(LINE):
        peak = larger(peak, magnitude(load(values, number)))
    return peak


def put(values: Any, rows: Any, block: int, begin: int) -> None:
    """Write values (count, LANES) to a block's inputs from `begin` on, a multiple of LINE; `count` is at most LINE."""
    raise NotImplementedError


@overload(put)
def _put(values, rows, block, begin):  # type: (Any, Any, Any, Any) -> Any  # noqa: ARG001
    if are_codes(rows):
        return lambda values, rows, block, begin: _put_codes(values, rows[block, begin // LINE * LINE_WORDS :])
    return lambda values, rows, block, begin: _put_words(values, rows[block, begin // 2 :])


def num_outputs_of(matrix: Any) -> int:
    """Number of outputs of a matrix; in 8 bits rounded up to whole groups."""
    raise NotImplementedError


@overload(num_outputs_of)
def _num_outputs_of(matrix):  # type: (Any) -> Any
    return (lambda matrix: LANES * len(matrix)) if is_int8(matrix) else (lambda matrix: len(matrix))
