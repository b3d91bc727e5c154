"""Matrix products with weights in their checkpoint layout, for compiled code.

Rows are the SIMD lanes: sixteen rows are multiplied with one number of the matrix at a time, so the matrix is read in
place and only once for all rows. Few rows waste lanes, but reading the matrix from memory takes as long anyway. Each
result is one sum in the order of its inputs, in any batch. This module knows no models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

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
    dot_pairs,
    load_some,
    multiplies_pairs,
    multiply_add,
    prefetch,
    rounded,
    shuffled,
    spaced,
    splat,
    store,
    widened,
    zeros,
)

WORD_BYTES = 4  # a float32, or two neighbouring bfloat16, which AMD's processors multiply and add in one instruction
LINE_BYTES = 64  # of a cache line
GROUP = 16  # outputs that are computed together, for all rows


def by_lanes(builder: ir.IRBuilder, vectors: Sequence[Any]) -> Any:
    """Interleave vectors into one: the first lanes of all vectors, then their second lanes, and so on."""
    width = 1  # of the interleaved runs so far
    while len(vectors) > 1:
        size = LANES * width
        pairs = [
            place
            for lane in range(0, size, width)
            for begin in (lane, size + lane)
            for place in range(begin, begin + width)
        ]
        vectors = [shuffled(builder, *two, pairs) for two in zip(vectors[::2], vectors[1::2], strict=True)]
        width *= 2
    return vectors[0]


def _times(builder: ir.IRBuilder, number: int, size: Any) -> Any:
    return builder.mul(size, ir.Constant(I64, number))


class Tile:
    """Generates code for some blocks of rows times some rows of the matrix; all its sums stay in registers."""

    def __init__(self, builder: ir.IRBuilder, num_blocks: int, num_outputs: int, is_bf16: bool) -> None:
        self._builder, self._is_bf16 = builder, is_bf16
        self._is_widened = is_bf16 and not multiplies_pairs()
        self._blocks, self._outputs = range(num_blocks), range(num_outputs)

    def sums(self, rows: Any, block_bytes: Any, matrix: Any, row_step: Any, row_bytes: Any) -> list[Any]:
        """Vectors of sums, ordered by block and then by output; the matrix is read cache line by cache line.

        Rows of the matrix are `row_step` bytes apart, and `row_bytes` long.
        """
        b, line_bytes = self._builder, ir.Constant(I64, LINE_BYTES)
        blocks = spaced(b, rows, block_bytes, len(self._blocks))
        weights = spaced(b, matrix, row_step, len(self._outputs))
        ahead = _times(b, len(weights), row_step)  # offset of the next tile's rows
        sums = zeros(b, FLOATS, len(blocks) * len(weights))
        with cgutils.for_range_slice(b, ir.Constant(I64, 0), row_bytes, line_bytes) as (begin, _):
            for row in weights:
                prefetch(b, at(b, at(b, row, begin), ahead))
            following = b.add(begin, line_bytes)
            end = b.select(b.icmp_signed("<", following, row_bytes), following, row_bytes)
            line = self._widened_line(weights, begin, end) if self._is_widened else None
            with cgutils.for_range_slice(b, begin, end, ir.Constant(I64, WORD_BYTES)) as (offset, _):
                places = [at(b, block, _times(b, LANES, offset)) for block in blocks]
                inputs = [b.load(place, typ=WORDS, align=WORD_BYTES) for place in places]
                before = [b.load(total) for total in sums]
                if line is None:
                    after = self._add_words(before, inputs, [at(b, row, offset) for row in weights])
                else:
                    after = self._add_widened(before, inputs, at(b, line, b.sub(offset, begin)))
                for total, added in zip(sums, after, strict=True):
                    b.store(added, total)
        return [b.load(total) for total in sums]

    def _add_words(self, sums: Sequence[Any], inputs: Sequence[Any], places: Sequence[Any]) -> list[Any]:
        """Add the products of the rows' word with the matrix's words at the addresses `places`."""
        b, add = self._builder, dot_pairs if self._is_bf16 else multiply_add
        numbers = [splat(b, b.load(place, typ=I32, align=2)) for place in places]
        pairs = [(some, number) for some in inputs for number in numbers]
        return [add(b, total, *pair) for total, pair in zip(sums, pairs, strict=True)]

    def _widened_line(self, weights: Sequence[Any], begin: Any, end: Any) -> Any:
        """Convert a cache line of each row of the matrix to float32 in scratch memory, which stays in the L1 cache.

        For each row it has the first numbers of LANES words, then the second ones; beyond the line's end it is 0.
        """
        b = self._builder
        scratch, num_bytes = cgutils.alloca_once(b, FLOATS, 2 * len(weights)), b.sub(end, begin)

        def put(load: Callable[[Any], Any]) -> None:
            for index, row in enumerate(weights):
                for part, numbers in enumerate(widened(b, load(at(b, row, begin)))):
                    store(b, numbers, at(b, scratch, ir.Constant(I64, (2 * index + part) * LANES * WORD_BYTES)))

        with b.if_else(b.icmp_unsigned("==", num_bytes, ir.Constant(I64, LINE_BYTES))) as (whole, part_of_it):
            with whole:
                put(lambda address: b.load(address, typ=WORDS, align=2))
            with part_of_it:
                num_words = splat(b, b.trunc(b.udiv(num_bytes, ir.Constant(I64, WORD_BYTES)), I32))
                is_there = b.icmp_unsigned("<", ir.Constant(WORDS, list(range(LANES))), num_words)
                put(lambda address: load_some(b, address, is_there))
        return scratch

    def _add_widened(self, sums: Sequence[Any], inputs: Sequence[Any], line: Any) -> list[Any]:
        """Add the products of the rows' word with a converted line's words at the address `line`."""
        b = self._builder
        for part, numbers in enumerate(zip(*(widened(b, words) for words in inputs), strict=True)):
            places = (ir.Constant(I64, (2 * output + part) * LANES * WORD_BYTES) for output in self._outputs)
            weights = [splat(b, b.load(at(b, line, place), typ=ir.FloatType(), align=4)) for place in places]
            pairs = [(some, weight) for some in numbers for weight in weights]
            sums = [multiply_add(b, total, *pair) for total, pair in zip(sums, pairs, strict=True)]
        return list(sums)

    def put_rows(self, sums: Sequence[Any], bias: Any, out: Any, out_row_bytes: Any, is_rounded: bool) -> None:
        """Add the bias, round to bfloat16 if `is_rounded`, and store by rows."""
        b, size = self._builder, len(self._outputs)
        places = [at(b, bias, ir.Constant(I64, 4 * output)) for output in self._outputs]
        added = [splat(b, b.load(place, typ=ir.FloatType(), align=4)) for place in places]
        for block in self._blocks:
            totals = [b.fadd(*two) for two in zip(sums[block * size : (block + 1) * size], added, strict=True)]
            together = by_lanes(b, [rounded(b, total) if is_rounded else total for total in totals])
            for row in range(LANES):
                part = shuffled(b, together, together, range(row * size, (row + 1) * size))
                place = at(b, out, _times(b, block * LANES + row, out_row_bytes))
                store(b, part, place)

    def add_lanes(self, sums: Sequence[Any], out: Any, out_block_bytes: Any) -> None:
        """Add the sums to `out`, which has the layout of the sums."""
        b, step = self._builder, LANES * WORD_BYTES
        for index, total in enumerate(sums):
            block, output = divmod(index, len(self._outputs))
            place = at(b, at(b, out, _times(b, block, out_block_bytes)), ir.Constant(I64, output * step))
            store(b, b.fadd(b.load(place, typ=FLOATS, align=4), total), place)


def tile_of(num_blocks: int, num_outputs: int) -> Any:
    """A tile of `multiply_groups` as a function for compiled code."""

    def tile(_context: Any, blocks: Any, block: Any, matrix: Any, output: Any, bias: Any, out: Any) -> Any:
        arguments = blocks, block, matrix, output, bias, out
        signature = numba.types.void(*arguments)

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            _, block, _, output, _, _ = values

            def array(place: int) -> tuple[Any, list[Any], list[Any]]:
                return array_of(context, builder, signature.args[place], values[place])

            def entry(begin: Any, stride: Any, index: Any) -> Any:
                return at(builder, begin, builder.mul(stride, index))

            kind_of_matrix, kind_of_out = signature.args[2], signature.args[5]
            (rows, (block_bytes, *_), (_, num_words, _)), (weights, (row_step, _), _) = array(0), array(2)
            result, steps, _ = array(5)
            row_bytes = _times(builder, WORD_BYTES, num_words)
            made = Tile(builder, num_blocks, num_outputs, kind_of_matrix.dtype == numba.types.uint16)
            matrix = entry(weights, row_step, output)
            sums = made.sums(entry(rows, block_bytes, block), block_bytes, matrix, row_step, row_bytes)
            if kind_of_out.ndim == 3:
                made.add_lanes(sums, entry(entry(result, steps[0], block), steps[1], output), steps[0])
            else:
                added, (float_bytes,), _ = array(4)
                first = entry(entry(result, steps[0], _times(builder, LANES, block)), steps[1], output)
                is_rounded = kind_of_out.dtype == numba.types.uint16
                made.put_rows(sums, entry(added, float_bytes, output), first, steps[0], is_rounded)
            return context.get_dummy_value()

        return signature, codegen

    return intrinsic(tile)


# As many sums as fit in registers besides their operands. With fewer outputs, converting rows would dominate.
_NUM_SUMS, _LEAST_OUTPUTS = NUM_VECTORS // 2, 4
_OF_1, _OF_2, _OF_4 = (_NUM_SUMS // num_blocks for num_blocks in (1, 2, 4))  # outputs of a tile
_tile_1, _tile_2, _tile_4 = tile_of(1, _OF_1), tile_of(2, _OF_2), tile_of(4, _OF_4)


@strict_inner
def lay_out(words: Any, block: Any, blocks: Any) -> Any:
    """Transpose a block of `words` (rows, words) to `blocks` (blocks, words, LANES); zeros beyond the last row."""
    begin, num_rows = block * LANES, len(words)
    for word in range(words.shape[1]):
        for lane in range(LANES):
            row = begin + lane
            blocks[block, word, lane] = words[row, word] if row < num_rows else 0


@strict_inner
def multiply_groups(blocks: Any, matrix: Any, begin: Any, end: Any, bias: Any, out: Any) -> Any:
    """Multiply rows with the groups [begin, end) of a matrix, GROUP outputs each.

    `blocks` is (blocks, words, LANES) of float32, or of int32 with two bfloat16 each; `matrix` is (outputs, inputs) of
    float32, or of bfloat16's bits as uint16. Either `out` is (rows in whole blocks, outputs) of float32 or bfloat16's
    bits and is set to sums plus `bias` (outputs,); or it is (blocks, outputs, LANES) float32, sums are added to it,
    `bias` is None and outputs fill whole groups.
    """
    num_blocks = len(blocks)
    for group in range(begin, end):
        output = min(group * GROUP, len(matrix) - GROUP)  # the last group may overlap the one before
        block = 0
        while _OF_4 >= _LEAST_OUTPUTS and block + 4 <= num_blocks:
            for part in range(0, GROUP, _OF_4):
                _tile_4(blocks, block, matrix, output + part, bias, out)
            block += 4
        while _OF_2 >= _LEAST_OUTPUTS and block + 2 <= num_blocks:
            for part in range(0, GROUP, _OF_2):
                _tile_2(blocks, block, matrix, output + part, bias, out)
            block += 2
        while block < num_blocks:
            for part in range(0, GROUP, _OF_1):
                _tile_1(blocks, block, matrix, output + part, bias, out)
            block += 1
