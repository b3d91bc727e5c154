"""Matrix products with rows and weights in 8 bits, for compiled code.

Outputs are the SIMD lanes: a matrix is laid out for this once, is read line by line, and is multiplied with exactly as
many rows as there are. Products of a line's inputs are summed exactly as integers and then scaled by the row's scale,
so a row's result depends on the row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from bough.model.cpu.gemm import WORD_BYTES, by_lanes
from bough.model.cpu.jit import strict_inner
from bough.model.cpu.llvm_vectors import (
    FLOATS,
    I32,
    I64,
    LANES,
    NUM_VECTORS,
    WORDS,
    array_of,
    at,
    dot_bytes,
    multiply_add,
    prefetch,
    shuffled,
    splat,
    store,
    zeros,
)
from bough.model.cpu.operands import LINE, LINE_WORDS

_WORD = LANES * WORD_BYTES  # bytes between words of a block or a group
_CODES = LINE // 4 * _WORD  # bytes of a line's codes


def _sums(b: ir.IRBuilder, num_rows: int, words: Any, group: Any, group_bytes: Any) -> list[Any]:
    """For each of `num_rows` rows, the first at `words`, a vector of its sums with a group of outputs."""
    rows, inputs_end = range(num_rows), b.sub(group_bytes, ir.Constant(I64, _WORD))

    def lanes(offset: Any, kind: ir.Type) -> list[Any]:
        places = [at(b, at(b, words, offset), ir.Constant(I64, WORD_BYTES * row)) for row in rows]
        return [splat(b, b.load(place, typ=kind, align=4)) for place in places]

    def plus(offset: Any, number: int) -> Any:
        return b.add(offset, ir.Constant(I64, number))

    totals, partial = zeros(b, FLOATS, num_rows), zeros(b, WORDS, num_rows)
    with cgutils.for_range_slice(b, ir.Constant(I64, 0), inputs_end, ir.Constant(I64, _CODES)) as (begin, line):
        row_begin = b.mul(line, ir.Constant(I64, LINE_WORDS * _WORD))
        scales_place = plus(row_begin, _CODES)
        for some, start in zip(partial, lanes(plus(scales_place, _WORD), I32), strict=True):
            b.store(start, some)
        with cgutils.for_range_slice(b, begin, plus(begin, _CODES), ir.Constant(I64, _WORD)) as (offset, _):
            place = at(b, group, offset)
            prefetch(b, at(b, place, group_bytes))  # of the next group
            numbers, inputs = b.load(place, typ=WORDS, align=4), lanes(b.add(row_begin, b.sub(offset, begin)), I32)
            for some, row in zip(partial, inputs, strict=True):
                b.store(dot_bytes(b, b.load(some), row, numbers), some)
        for total, some, scale in zip(totals, partial, lanes(scales_place, ir.FloatType()), strict=True):
            b.store(multiply_add(b, b.load(total), b.sitofp(b.load(some), FLOATS), scale), total)
    scales_of_outputs = b.load(at(b, group, inputs_end), typ=FLOATS, align=4)
    return [b.fmul(b.load(total), scales_of_outputs) for total in totals]


def _put_rows(b: ir.IRBuilder, sums: Sequence[Any], bias: Any, out: Any, out_row_bytes: Any) -> None:
    added = b.load(bias, typ=FLOATS, align=4)
    for row, total in enumerate(sums):
        store(b, b.fadd(total, added), at(b, out, b.mul(out_row_bytes, ir.Constant(I64, row))))


def _add_lanes(b: ir.IRBuilder, sums: Sequence[Any], out: Any) -> None:
    together = by_lanes(b, sums)
    for output in range(LANES):
        part = shuffled(b, together, together, range(output * len(sums), (output + 1) * len(sums)))
        place = at(b, out, ir.Constant(I64, output * _WORD))
        store(b, b.fadd(b.load(place, typ=part.type, align=4), part), place)


def tile_of(num_rows: int) -> Any:
    """A function for compiled code: `num_rows` rows times one group of outputs; see `multiply_int8`."""

    def tile(_context: Any, rows: Any, row: Any, matrix: Any, group: Any, bias: Any, out: Any) -> Any:
        signature = numba.types.void(rows, row, matrix, group, bias, out)

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            def array(place: int) -> tuple[Any, list[Any]]:
                """Address and strides in bytes of an argument."""
                return array_of(context, builder, signature.args[place], values[place])[:2]

            def entry(begin: Any, stride: Any, index: Any) -> Any:
                return at(builder, begin, builder.mul(stride, index))

            _, row, _, group, _, _ = values
            lanes = ir.Constant(I64, LANES)
            block, lane = builder.udiv(row, lanes), builder.urem(row, lanes)
            lane_bytes = builder.mul(lane, ir.Constant(I64, WORD_BYTES))
            (words, (block_bytes, *_)), (groups, (group_bytes, *_)) = map(array, (0, 2))
            first = at(builder, entry(words, block_bytes, block), lane_bytes)
            of_group = entry(groups, group_bytes, group)
            sums = _sums(builder, num_rows, first, of_group, group_bytes)
            result, steps = array(5)
            output = builder.mul(group, lanes)
            if signature.args[5].ndim == 3:
                begin = entry(entry(result, steps[0], block), steps[1], output)
                _add_lanes(builder, sums, at(builder, begin, lane_bytes))
            else:
                added, (float_bytes,) = array(4)
                begin = entry(entry(result, steps[0], row), steps[1], output)
                _put_rows(builder, sums, entry(added, float_bytes, output), begin, steps[0])
            return context.get_dummy_value()

        return signature, codegen

    return intrinsic(tile)


# Registers hold a line's sums of so many rows besides their operands; sums of earlier lines are kept in memory.
# A tile reads its group once, so more rows mean less traffic from memory and caches for each product.
_MOST_ROWS = NUM_VECTORS // 2
_tile_1, _tile_2, _tile_4, _tile_8, _tile_16 = map(tile_of, (1, 2, 4, 8, LANES))
_HAS_16, _MOST_WITHOUT = _MOST_ROWS >= LANES, 12  # rows up to which smaller tiles are faster


@strict_inner
def _multiply_some(rows: Any, row: Any, num_remaining: Any, matrix: Any, group: Any, bias: Any, out: Any) -> Any:
    """Multiply rows from `row` on, as many as a tile takes; returns their number."""
    if _HAS_16 and num_remaining > _MOST_WITHOUT:
        _tile_16(rows, row, matrix, group, bias, out)
        return 16
    if _MOST_ROWS >= 8 and num_remaining > 4:
        _tile_8(rows, row, matrix, group, bias, out)
        return 8
    if num_remaining > 2:
        _tile_4(rows, row, matrix, group, bias, out)
        return 4
    if num_remaining > 1:
        _tile_2(rows, row, matrix, group, bias, out)
        return 2
    _tile_1(rows, row, matrix, group, bias, out)
    return 1


@strict_inner
def multiply_int8(rows: Any, num_rows: Any, matrix: Any, begin: Any, end: Any, bias: Any, out: Any) -> Any:
    """Multiply rows in 8 bits with groups [begin, end) of a matrix in 8 bits; `out` as in `gemm_parallel.multiply`."""
    for group in range(begin, end):
        row = 0
        while row < num_rows:
            row += _multiply_some(rows, row, num_rows - row, matrix, group, bias, out)
