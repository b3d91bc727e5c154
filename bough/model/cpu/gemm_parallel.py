"""Products of rows, many or few, with a whole matrix, shared by all threads.

Products of few rows equal those of `bough.model.cpu.gemm` bit for bit, which would compute sixteen rows for one. Here
outputs are the lanes: lines of the matrix are transposed in registers, and a vector has the same input of some outputs.
Each sum is added number by number, as there. This is for processors that multiply bfloat16 one by one; with an
instruction for pairs, sixteen rows cost less than reading the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic, overload

from bough.model.cpu.float_bits import widened as widened_number
from bough.model.cpu.gemm import GROUP, multiply_groups
from bough.model.cpu.gemm_int8 import multiply_int8
from bough.model.cpu.jit import strict_inner
from bough.model.cpu.llvm_vectors import (
    FLOATS,
    I32,
    I64,
    LANES,
    SHORT,
    array_of,
    at,
    multiplies_pairs,
    multiply_add,
    prefetch,
    rounded,
    shuffled,
    spaced,
    splat,
    store,
    turned,
    widened,
    zeros,
)
from bough.model.cpu.operands import are_codes, num_outputs_of
from bough.model.cpu.work_stealing import shared

PIECES = 8  # of a matrix per thread, for work stealing
_HAS_FEW = not multiplies_pairs()  # whether few rows have a separate product, with the same bits
MOST = 8  # most rows that count as few
_SHORTS, _SHORT_WORDS = ir.VectorType(ir.FloatType(), SHORT), ir.VectorType(I32, SHORT)
_WORD_BYTES, _FLOAT_BYTES = 4, 4


def _sums(
    b: ir.IRBuilder, rows: Sequence[Any], parts: Sequence[Sequence[Any]], ahead: Any, num_words: Any
) -> list[list[Any]]:
    """Sums of each float32 row with SHORT outputs (addresses) of each part; `num_words` is a multiple of SHORT."""
    sums = [zeros(b, _SHORTS, len(rows)) for _ in parts]
    with cgutils.for_range_slice(b, ir.Constant(I64, 0), num_words, ir.Constant(I64, SHORT)) as (word, _):
        offset = b.mul(word, ir.Constant(I64, _WORD_BYTES))
        for weights in parts:
            for weight in weights:
                prefetch(b, at(b, at(b, weight, offset), ahead))
        words_of = [
            turned(b, [b.load(at(b, weight, offset), typ=_SHORT_WORDS, align=2) for weight in weights])
            for weights in parts
        ]
        for index in range(SHORT):
            weights_of = [widened(b, words[index]) for words in words_of]
            for odd in range(2):
                place = b.add(b.mul(offset, ir.Constant(I64, 2)), ir.Constant(I64, _FLOAT_BYTES * (2 * index + odd)))
                loaded = [b.load(at(b, row, place), typ=ir.FloatType(), align=4) for row in rows]
                numbers = [splat(b, number, SHORT) for number in loaded]
                for totals, weights in zip(sums, weights_of, strict=True):
                    for total, number in zip(totals, numbers, strict=True):
                        b.store(multiply_add(b, b.load(total), number, weights[odd]), total)
    return [[b.load(total) for total in totals] for totals in sums]


def _tile_of(num_rows: int) -> Any:
    """A function that compiled code may call: as many rows with GROUP outputs."""

    def tile(_context: Any, rows: Any, matrix: Any, output: Any, bias: Any, out: Any) -> Any:
        signature = numba.types.void(rows, matrix, output, bias, out)

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            arrays = {i: array_of(context, builder, signature.args[i], values[i]) for i in (0, 1, 4)}
            first, (step, _), (_, num_floats) = arrays[0]
            begin, (row_step, _), _ = arrays[1]
            weights = spaced(builder, at(builder, begin, builder.mul(row_step, values[2])), row_step, GROUP)
            ahead = builder.mul(row_step, ir.Constant(I64, GROUP))
            halves = [weights[:SHORT], weights[SHORT:]]
            inputs, num_words = spaced(builder, first, step, num_rows), builder.lshr(num_floats, ir.Constant(I64, 1))
            if num_rows == 1:  # a single sum would wait for its own latency
                sums = _sums(builder, inputs, halves, ahead, num_words)
            else:
                sums = [_sums(builder, inputs, [half], ahead, num_words)[0] for half in halves]
            totals = [shuffled(builder, low, high, range(LANES)) for low, high in zip(*sums, strict=True)]
            begin, steps, _ = arrays[4]
            begin = at(builder, begin, builder.mul(steps[1], values[2]))
            if signature.args[4].ndim == 3:
                for row, total in enumerate(totals):
                    lane = at(builder, begin, ir.Constant(I64, _FLOAT_BYTES * row))
                    for output, address in enumerate(spaced(builder, lane, steps[1], GROUP)):
                        part = builder.extract_element(total, ir.Constant(I32, output))
                        place = builder.bitcast(address, ir.FloatType().as_pointer())
                        before = builder.load(address, typ=ir.FloatType(), align=4)
                        builder.store(builder.fadd(before, part), place, align=4)
            else:
                added, (float_bytes,), _ = array_of(context, builder, signature.args[3], values[3])
                added = at(builder, added, builder.mul(float_bytes, values[2]))
                bias = builder.load(added, typ=FLOATS, align=4)
                for total, address in zip(totals, spaced(builder, begin, steps[0], num_rows), strict=True):
                    number = builder.fadd(total, bias)
                    is_rounded = signature.args[4].dtype == numba.types.uint16
                    store(builder, rounded(builder, number) if is_rounded else number, address)
            return context.get_dummy_value()

        return signature, codegen

    return intrinsic(tile)


_tile_1, _tile_2, _tile_4, _tile_8 = map(_tile_of, (1, 2, 4, MOST))


@strict_inner
def few_of(blocks: Any, num_rows: Any) -> Any:
    """The rows themselves, 1, 2, 4 or 8 of them, (rows, inputs) float32; no rows if there are more.

    Their inputs must fill SHORT words, too. `blocks` are those of bfloat16 that `bough.model.cpu.gemm` has.
    """
    count = 1 if 0 < num_rows <= MOST and blocks.shape[1] % SHORT == 0 else 0
    while 0 < count < num_rows:
        count *= 2
    rows = np.empty((count, 2 * blocks.shape[1]), np.float32)
    for word in range(blocks.shape[1] if count else 0):
        for row in range(count):
            pair = blocks[0, word, row]
            rows[row, 2 * word] = widened_number(np.uint16(pair & 0xFFFF))
            rows[row, 2 * word + 1] = widened_number(np.uint16((pair >> 16) & 0xFFFF))
    return rows


@strict_inner
def multiply_few(rows: Any, matrix: Any, begin: Any, end: Any, bias: Any, out: Any) -> Any:
    """Multiply 1, 2, 4 or 8 rows, as `few_of` makes them, with the groups [begin, end) of a matrix, and add `bias`."""
    for group in range(begin, end):
        output = min(group * GROUP, len(matrix) - GROUP)
        if len(rows) == 1:
            _tile_1(rows, matrix, output, bias, out)
        elif len(rows) == 2:
            _tile_2(rows, matrix, output, bias, out)
        elif len(rows) == 4:
            _tile_4(rows, matrix, output, bias, out)
        else:
            _tile_8(rows, matrix, output, bias, out)


def multiply(rows: Any, few: Any, num_rows: Any, matrix: Any, begin: int, end: int, bias: Any, out: Any) -> None:
    """Multiply `num_rows` rows with groups [begin, end) of a matrix, GROUP outputs each. For kernels only.

    Either `out` is (rows in whole blocks, outputs) of float32 or, for products in 16 bits, of bfloat16's bits and is
    set to sums plus `bias` (outputs,); or it is (blocks, outputs, LANES) float32, sums are added to it and `bias` is
    None. `few` is what `form_of` makes of the rows.
    """
    raise NotImplementedError


@overload(multiply)
def _multiply(rows, few, num_rows, matrix, begin, end, bias, out):  # type: (Any, Any, Any, Any, Any, Any, Any, Any) -> Any  # noqa: ARG001
    def few_or_many(rows, few, num_rows, matrix, begin, end, bias, out):  # type: (Any, Any, Any, Any, Any, Any, Any, Any) -> None  # noqa: ARG001
        if len(few):
            multiply_few(few, matrix, begin, end, bias, out)
        else:
            multiply_groups(rows, matrix, begin, end, bias, out)

    def in_8_bits(rows, few, num_rows, matrix, begin, end, bias, out):  # type: (Any, Any, Any, Any, Any, Any, Any, Any) -> None  # noqa: ARG001
        multiply_int8(rows, num_rows, matrix, begin, end, bias, out)

    def as_they_stand(rows, few, num_rows, matrix, begin, end, bias, out):  # type: (Any, Any, Any, Any, Any, Any, Any, Any) -> None  # noqa: ARG001
        multiply_groups(rows, matrix, begin, end, bias, out)

    if are_codes(rows):
        return in_8_bits
    return few_or_many if _HAS_FEW and rows.dtype == numba.types.int32 else as_they_stand


def form_of(rows: Any, num_rows: Any) -> Any:
    """Few rows in 16 bits in the form for products; empty if rows are used as they are.

    Only within kernels.
    """
    raise NotImplementedError


@overload(form_of)
def _form_of(rows, num_rows):  # type: (Any, Any) -> Any  # noqa: ARG001
    if _HAS_FEW and rows.dtype == numba.types.int32:
        return lambda rows, num_rows: few_of(rows, num_rows)
    return lambda rows, num_rows: rows[:0]  # noqa: ARG005


@strict_inner
def num_groups_of(matrix: Any) -> Any:
    """Number of groups of a matrix's outputs."""
    return (num_outputs_of(matrix) + GROUP - 1) // GROUP


@strict_inner
def num_pieces_of(num_parts: Any, num_threads: Any) -> Any:
    """Number of pieces in which threads take `num_parts` parts of a matrix."""
    return min(num_parts, PIECES * num_threads)


@strict_inner
def parts_of(piece: Any, num_pieces: Any, num_parts: Any) -> Any:
    """The parts [begin, end) of a piece."""
    return piece * num_parts // num_pieces, (piece + 1) * num_parts // num_pieces


@strict_inner
def share_product(
    taken: Any, thread: Any, num_threads: Any, rows: Any, num_rows: Any, matrix: Any, bias: Any, out: Any
) -> Any:
    """A thread's share of a product; `taken` is a row of `bough.model.cpu.work_stealing.counters`."""
    few, num_groups = form_of(rows, num_rows), num_groups_of(matrix)
    num_pieces = num_pieces_of(num_groups, num_threads)
    for piece in shared(taken, thread, num_threads, num_pieces):
        begin, end = parts_of(piece, num_pieces, num_groups)
        multiply(rows, few, num_rows, matrix, begin, end, bias, out)
