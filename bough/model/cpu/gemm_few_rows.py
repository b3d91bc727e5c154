"""Products of so few rows that reading the matrix is what takes time: inputs are the lanes, and no lane is idle.

`bough.model.cpu.gemm` would compute sixteen rows where there is one. Sums are added up in another order than there, so
these are for those who need not care about the last bit, on processors with many registers. For others there is
`bough.model.cpu.gemm_few_outputs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from bough.model.cpu.gemm import GROUP, LINE_BYTES, compiled
from bough.model.cpu.llvm_vectors import (
    FLOATS,
    I64,
    LANES,
    NUM_VECTORS,
    SECOND_LEVEL,
    WORDS,
    array_of,
    at,
    dot_pairs,
    prefetch,
    shuffled,
    spaced,
    store,
)

MOST = 8  # rows that are few
_NUM_SUMS = NUM_VECTORS // 2  # that registers hold, beside what they are made of
_MOST_ROWS = _NUM_SUMS // 2  # that are computed with at a time


def _sums(b: ir.IRBuilder, rows: Sequence[Any], weights: Sequence[Any], ahead: Any, row_bytes: Any) -> dict[Any, Any]:
    """Of each row (place among `rows`) with each output (place among `weights`), in parts, lane by lane."""
    num_rows, sums = min(len(rows), _MOST_ROWS), {}
    num_outputs = min(len(weights), _NUM_SUMS // num_rows)
    for row, output in product(range(0, len(rows), num_rows), range(0, len(weights), num_outputs)):
        some = rows[row : row + num_rows], weights[output : output + num_outputs]
        for place, part in _sums_at_once(b, *some, ahead, row_bytes).items():
            sums[row + place[0], output + place[1]] = part
    return sums


def _sums_at_once(
    b: ir.IRBuilder, rows: Sequence[Any], weights: Sequence[Any], ahead: Any, row_bytes: Any
) -> dict[Any, Any]:
    """As `_sums`, in registers."""
    entry, line, done = b.block, b.append_basic_block("line"), b.append_basic_block("done")
    b.branch(line)
    b.position_at_end(line)
    places = [(row, output) for row in range(len(rows)) for output in range(len(weights))]
    offset, begins = b.phi(I64), {place: b.phi(FLOATS) for place in places}
    for weight in weights:
        prefetch(b, at(b, at(b, weight, offset), ahead), SECOND_LEVEL)
    inputs, numbers = ([b.load(at(b, base, offset), typ=WORDS, align=2) for base in bases] for bases in (rows, weights))
    sums = {(row, output): dot_pairs(b, begins[row, output], inputs[row], numbers[output]) for row, output in places}
    following = b.add(offset, ir.Constant(I64, LINE_BYTES))
    b.cbranch(b.icmp_signed("<", following, row_bytes), line, done)
    offset.add_incoming(ir.Constant(I64, 0), entry)
    offset.add_incoming(following, line)
    for place, begin in begins.items():
        begin.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), entry)
        begin.add_incoming(sums[place], line)
    b.position_at_end(done)
    return sums


def _added_up(b: ir.IRBuilder, vectors: Sequence[Any]) -> Any:
    """One vector of the sums over all lanes of LANES vectors, in their order."""
    halves = [[2 * lane + odd for lane in range(LANES)] for odd in range(2)]
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [b.fadd(*(shuffled(b, *pair, places) for places in halves)) for pair in pairs]
    return vectors[0]


def _tile_of(num_rows: int) -> Any:
    """A function that compiled code may call: as many rows with LANES / num_rows outputs."""
    outputs = range(LANES // num_rows)

    def tile(_context, rows, matrix, output, bias, out):  # type: ignore[no-untyped-def]
        signature = numba.types.void(rows, matrix, output, bias, out)

        def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
            arrays = {i: array_of(context, builder, signature.args[i], values[i]) for i in (0, 1, 4)}

            def put(address: Any, some: Any, part: Any) -> None:
                store(builder, builder.fadd(part, builder.load(some, typ=part.type, align=4)), address)

            first, (step, word_bytes), (_, num_words) = arrays[0]
            begin, (row_step, _), _ = arrays[1]
            weights = spaced(builder, at(builder, begin, builder.mul(row_step, values[2])), row_step, len(outputs))
            ahead = builder.mul(row_step, ir.Constant(I64, GROUP))
            row_bytes = builder.mul(num_words, word_bytes)
            sums = _sums(builder, spaced(builder, first, step, num_rows), weights, ahead, row_bytes)
            begin, steps, _ = arrays[4]
            if signature.args[4].ndim == 3:
                together = _added_up(builder, [sums[row, output] for output in outputs for row in range(num_rows)])
                begin = at(builder, begin, builder.mul(steps[1], values[2]))
                for output, address in enumerate(spaced(builder, begin, steps[1], len(outputs))):
                    places = range(output * num_rows, (output + 1) * num_rows)
                    put(address, address, shuffled(builder, together, together, places))
            else:
                together = _added_up(builder, [sums[row, output] for row in range(num_rows) for output in outputs])
                added, (float_bytes,), _ = array_of(context, builder, signature.args[3], values[3])
                added = at(builder, added, builder.mul(float_bytes, values[2]))
                begin = at(builder, begin, builder.mul(steps[1], values[2]))
                for row, address in enumerate(spaced(builder, begin, steps[0], num_rows)):
                    places = range(row * len(outputs), (row + 1) * len(outputs))
                    put(address, added, shuffled(builder, together, together, places))
            return context.get_dummy_value()

        return signature, codegen

    return intrinsic(tile)


_tile_1, _tile_2, _tile_4, _tile_8 = map(_tile_of, (1, 2, 4, MOST))


@compiled
def num_few(num_rows, are_whole):  # type: ignore[no-untyped-def]
    """As how many rows some are computed, 1, 2, 4 or 8; 0 where they are not few, or their inputs fill no vectors."""
    count = 1 if 0 < num_rows <= MOST and are_whole else 0
    while 0 < count < num_rows:
        count *= 2
    return count


@compiled
def few_of(blocks, num_rows):  # type: ignore[no-untyped-def]
    """The rows themselves, 1, 2, 4 or 8 of them, (rows, words); none where they are not few.

    They must fill whole lines, too. `blocks` as `bough.model.cpu.gemm` has them.
    """
    count = num_few(num_rows, blocks.shape[1] % LANES == 0)
    rows = np.empty((count, blocks.shape[1]), np.int32)
    for word in range(blocks.shape[1] if count else 0):
        for row in range(count):
            rows[row, word] = blocks[0, word, row]
    return rows


@compiled
def multiply_few(rows, matrix, begin, end, bias, out):  # type: ignore[no-untyped-def]
    """As `bough.model.cpu.gemm.multiply_groups`, of rows (1, 2, 4 or 8, words): two bfloat16 a word, in whole lines."""
    for group in range(begin, end):
        output = min(group * GROUP, len(matrix) - GROUP)
        for part in range(0, GROUP, LANES // len(rows)):
            if len(rows) == 1:
                _tile_1(rows, matrix, output + part, bias, out)
            elif len(rows) == 2:
                _tile_2(rows, matrix, output + part, bias, out)
            elif len(rows) == 4:
                _tile_4(rows, matrix, output + part, bias, out)
            else:
                _tile_8(rows, matrix, output + part, bias, out)
