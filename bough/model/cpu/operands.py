"""What products are made of in layers that are compiled whole: rows in blocks of LANES, and matrices.

In 16 bits, rows are (blocks, words, LANES) int32, two bfloat16 a word, and matrices (outputs, inputs) of bfloat16's
bits, as a checkpoint has them. In 8 bits, each line of LINE numbers of a row has a scale, and each output of a matrix:

- rows (blocks, lines * LINE_WORDS, LANES) uint32: for each line LINE / 4 words of four codes with their signs, then the
  bits of a float32, which is the scale, and an int32, which makes up for ZERO in the matrix;
- matrices (groups, inputs / 4 + 1, LANES) int32: outputs are lanes. Each group has words of four codes without signs,
  of which ZERO counts as 0, then the bits of the scales.

The functions are for compiled code, and only there.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.extending import overload

from bough.model.cpu.float_bits import widened
from bough.model.cpu.gemm import LINE_BYTES
from bough.model.cpu.jit import strict_inner
from bough.model.cpu.llvm_vectors import LANES, MOST_SIGNED
from bough.model.cpu.simd import all_lanes, larger, load, magnitude, nearest, pair, store, where_positive

LINE = LINE_BYTES  # numbers that have a scale together, in 8 bits, and that are put together
MOST = 127  # of a matrix's code with its sign, which is from ZERO
ZERO = 128  # one factor of the instruction for products of bytes has no sign
LINE_WORDS = LINE // 4 + 2


def are_codes(rows: Any) -> bool:
    """Whether rows are in 8 bits, by numba's type of them."""
    return bool(rows.dtype == numba.types.uint32)


def is_int8(matrix: Any) -> bool:
    """Whether a matrix is in 8 bits, or many are, by numba's type."""
    return bool(matrix.dtype == numba.types.int32)


@strict_inner
def _put_words(values: Any, words: Any) -> Any:
    for word in range(len(values) // 2):
        store(words, word, pair(load(values, 2 * word), load(values, 2 * word + 1)))


@strict_inner
def _put_codes(values: Any, words: Any) -> Any:
    """A line of numbers, (LINE, LANES), in LINE_WORDS words."""
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
    """What the largest code stands for."""
    peak = all_lanes(np.float32(0))
    for number in range(LINE):
        peak = larger(peak, magnitude(load(values, number)))
    return peak


def put(values: Any, rows: Any, block: int, begin: int) -> None:
    """Puts numbers (count, LANES) where inputs stand from `begin` on, a multiple of LINE: a line, or what is left."""
    raise NotImplementedError


@overload(put)
def _put(values, rows, block, begin):  # type: ignore[no-untyped-def]  # noqa: ARG001
    if are_codes(rows):
        return lambda values, rows, block, begin: _put_codes(values, rows[block, begin // LINE * LINE_WORDS :])
    return lambda values, rows, block, begin: _put_words(values, rows[block, begin // 2 :])


def num_outputs_of(matrix: Any) -> int:
    """Outputs of a matrix, in 8 bits those that fill its groups."""
    raise NotImplementedError


@overload(num_outputs_of)
def _num_outputs_of(matrix):  # type: ignore[no-untyped-def]
    return (lambda matrix: LANES * len(matrix)) if is_int8(matrix) else (lambda matrix: len(matrix))


def put_output(matrix: Any, output: int, out: Any) -> None:
    """One output's numbers, in float32."""
    raise NotImplementedError


@overload(put_output)
def _put_output(matrix, output, out):  # type: ignore[no-untyped-def]  # noqa: ARG001
    def of_codes(matrix, output, out):  # type: ignore[no-untyped-def]
        words = matrix[output // LANES, :, output % LANES]
        scale = np.int32(words[len(words) - 1]).view(np.float32)
        for i in range(len(out)):
            code = (words[i // 4] >> np.int32(8 * (i % 4))) & np.int32(0xFF)
            out[i] = np.float32(code - np.int32(ZERO)) * scale

    def of_bits(matrix, output, out):  # type: ignore[no-untyped-def]
        for i in range(len(out)):
            out[i] = widened(matrix[output, i])

    return of_codes if is_int8(matrix) else of_bits
