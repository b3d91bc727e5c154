"""Products by registers of tiles (`bough.model.cpu.amx`), piece by piece, for compiled code.

Operands stand as they do for vectors, so that nothing is laid out for these alone: a block of rows, word by word for
sixteen of them, is what the second tile of a product is to be, sixteen outputs of a matrix in 16 bits are the first. In
8 bits a group of the matrix is the second, and rows' codes are turned round to be the first. A row's result depends on
the row alone; in 8 bits it is bit for bit that of vectors, in 16 bits it is added up in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from bough.model.cpu import amx
from bough.model.cpu.amx import ROW_BYTES, ROWS, TILE_BYTES
from bough.model.cpu.gemm import GROUP, LINE_BYTES, WORD_BYTES, Tile, compiled, multiply_groups, tile_of
from bough.model.cpu.gemm_int8 import multiply_int8
from bough.model.cpu.gemm_int8 import tile_of as int8_tile_of
from bough.model.cpu.llvm_vectors import (
    FLOATS,
    I32,
    I64,
    LANES,
    SECOND_LEVEL,
    WORDS,
    at,
    multiply_add,
    prefetch,
    spaced,
    splat,
)
from bough.model.cpu.operands import LINE, LINE_WORDS, PARTS, ZERO

MOST_BY_VECTORS = 8  # rows in 8 bits: of fewer than fill a tile, vectors ask for no turning round
_FIRST, _SECOND = 4, 5  # tiles that are multiplied; those before take sums


def _room(b: ir.IRBuilder, num_tiles: int) -> Any:
    """For tiles to be stored in, on the stack."""
    made = cgutils.alloca_once(b, ir.ArrayType(ir.IntType(8), num_tiles * TILE_BYTES))
    made.align = ROW_BYTES
    return made


def _looped(b: ir.IRBuilder, begins: Sequence[Any], end: Any) -> tuple[Any, Any]:
    """A loop over lines, at least one: places that go on from `begins` until the first is at `end`, and what ends it.

    The function that is returned takes how far each goes on.
    """
    entry, line, done = b.block, b.append_basic_block("line"), b.append_basic_block("done")
    b.branch(line)
    b.position_at_end(line)
    places = [b.phi(begin.type) for begin in begins]

    def finish(following: Sequence[Any]) -> None:
        b.cbranch(b.icmp_signed("<", following[0], end), line, done)
        for place, first, after in zip(places, begins, following, strict=True):
            place.add_incoming(first, entry)
            place.add_incoming(after, b.block)
        b.position_at_end(done)

    return places, finish


class _Tile(Tile):
    """The code for up to four blocks of rows with GROUP outputs, in 16 bits; rows of the matrix are whole lines."""

    def sums(self, rows: Any, block_bytes: Any, matrix: Any, row_step: Any, row_bytes: Any) -> list[Any]:
        """As `Tile.sums` has them."""
        b, room = self._builder, _room(self._builder, len(self._blocks))
        blocks = spaced(b, rows, block_bytes, len(self._blocks))
        next_group = at(b, matrix, b.mul(row_step, ir.Constant(I64, GROUP)))
        for block in self._blocks:
            amx.clear(b, block)
        (offset,), finish = _looped(b, [ir.Constant(I64, 0)], row_bytes)
        amx.load(b, _FIRST, at(b, matrix, offset), row_step)
        for place in spaced(b, at(b, next_group, offset), row_step, GROUP):
            prefetch(b, place, SECOND_LEVEL)
        for block, begin in enumerate(blocks):
            place = at(b, begin, b.mul(offset, ir.Constant(I64, LANES)))
            amx.load(b, _SECOND, place, ir.Constant(I64, LANES * WORD_BYTES))
            amx.add_pairs(b, block, _FIRST, _SECOND)
        finish([b.add(offset, ir.Constant(I64, LINE_BYTES))])
        places = spaced(b, room, ir.Constant(I64, TILE_BYTES), len(self._blocks))
        for block, place in enumerate(places):
            amx.store(b, block, place)
        return [row for place in places for row in amx.rows_at(b, place, FLOATS)]


def _int8_sums(
    b: ir.IRBuilder, num_rows: int, _count: Any, words: Any, codes: Any, group: Any, group_bytes: Any
) -> list[Any]:
    """As `bough.model.cpu.gemm_int8` has them, of a whole block, whose `codes` have been turned round."""
    room, word_bytes = _room(b, 1), LANES * WORD_BYTES
    scales_end = b.sub(group_bytes, ir.Constant(I64, word_bytes))
    zero, zeros = ir.Constant(I64, 0), [ir.Constant(FLOATS, [0.0] * LANES)] * num_rows
    (offset, row_offset, *totals), finish = _looped(b, [zero, zero, *zeros], scales_end)

    def of_rows(place: Any, kind: ir.Type) -> list[Any]:
        """What stands once for each row, beside its codes."""
        return [splat(b, b.load(one, typ=kind, align=4)) for one in spaced(b, place, ir.Constant(I64, 4), num_rows)]

    place = at(b, group, offset)
    for line in spaced(b, at(b, place, group_bytes), ir.Constant(I64, LINE_BYTES), TILE_BYTES // LINE_BYTES):
        prefetch(b, line, SECOND_LEVEL)
    amx.clear(b, 0)
    amx.load(b, _FIRST, at(b, codes, offset), ir.Constant(I64, ROW_BYTES))
    amx.load(b, _SECOND, place, ir.Constant(I64, word_bytes))
    amx.add_fours(b, 0, _FIRST, _SECOND)
    amx.store(b, 0, room)
    scales_place = at(b, at(b, words, row_offset), ir.Constant(I64, TILE_BYTES))
    scales = of_rows(scales_place, ir.FloatType())
    starts = of_rows(at(b, scales_place, ir.Constant(I64, word_bytes)), I32)
    sums = [b.add(*two) for two in zip(amx.rows_at(b, room, WORDS), starts, strict=True)]
    added = [
        multiply_add(b, total, b.sitofp(some, FLOATS), scale)
        for total, some, scale in zip(totals, sums, scales, strict=True)
    ]
    steps = (ir.Constant(I64, number) for number in (TILE_BYTES, LINE_WORDS * word_bytes))
    finish([*(b.add(*two) for two in zip((offset, row_offset), steps, strict=True)), *added])
    scales_of_outputs = b.load(at(b, group, scales_end), typ=FLOATS, align=4)
    return [b.fmul(total, scales_of_outputs) for total in added]


def _said(name: str) -> Any:
    """A function of `bough.model.cpu.amx` without arguments, as compiled code may call it."""

    def function(_context):  # type: ignore[no-untyped-def]
        def codegen(context, builder, _signature, _values):  # type: ignore[no-untyped-def]
            getattr(amx, name)(builder)
            return context.get_dummy_value()

        return numba.types.void(), codegen

    return intrinsic(function)


_begin, _end = _said("begin"), _said("end")
_tile_1, _tile_2, _tile_4 = (tile_of(num_blocks, GROUP, _Tile) for num_blocks in (1, 2, 4))
_int8_tile = int8_tile_of(LANES, _int8_sums)


@compiled
def multiply_groups_by_tiles(blocks, matrix, begin, end, bias, out):  # type: ignore[no-untyped-def]
    """As `gemm.multiply_groups`, in 16 bits; by vectors where rows of the matrix are not whole lines."""
    num_blocks = len(blocks)
    if 2 * matrix.shape[1] % LINE_BYTES:
        multiply_groups(blocks, matrix, begin, end, bias, out)
        return
    _begin()
    for group in range(begin, end):
        output = min(group * GROUP, len(matrix) - GROUP)  # the last group may compute again what others did
        block = 0
        while block + 4 <= num_blocks:
            _tile_4(blocks, block, matrix, output, bias, out)
            block += 4
        if block + 2 <= num_blocks:
            _tile_2(blocks, block, matrix, output, bias, out)
            block += 2
        if block < num_blocks:
            _tile_1(blocks, block, matrix, output, bias, out)
    _end()


@compiled
def codes_by_row(rows, num_rows):  # type: ignore[no-untyped-def]
    """Codes of rows in 8 bits, (blocks, lines, ROWS, words), which stood word by word; none of few rows."""
    num_blocks = (num_rows + LANES - 1) // LANES if num_rows > MOST_BY_VECTORS else 0
    num_lines, num_words = rows.shape[1] // LINE_WORDS, LINE // WORD_BYTES
    codes = np.empty((num_blocks, num_lines, ROWS, num_words), rows.dtype)
    for block in range(num_blocks):
        for line in range(num_lines):
            for row in range(ROWS):
                for word in range(num_words):
                    codes[block, line, row, word] = rows[block, line * LINE_WORDS + word, row]
    return codes


@compiled
def multiply_int8_by_tiles(rows, codes, num_rows, matrix, begin, end, bias, out):  # type: ignore[no-untyped-def]
    """As `bough.model.cpu.gemm_int8.multiply_int8`, with `codes_by_row` of the rows."""
    if len(codes) == 0:
        multiply_int8(rows, num_rows, matrix, begin, end, bias, out)
        return
    _begin()
    for group in range(begin, end):
        for block in range(len(codes)):
            _int8_tile(rows, codes, block * LANES, LANES, matrix, group, bias, out)
    _end()


def are_right(in_16_bits: Any = multiply_groups_by_tiles, in_8_bits: Any = multiply_int8_by_tiles) -> bool:
    """Whether tiles give what they should: products of small whole numbers, whose sums are exact in any order."""
    rng = np.random.default_rng(0)
    rows, matrix = (rng.integers(-8, 9, (count, 3 * LINE)) for count in (7 * LANES, GROUP))  # four blocks, two and one
    of_pairs, of_fours = (np.zeros((len(rows), GROUP), np.float32) for _ in range(2))
    bias = np.zeros(GROUP, np.float32)
    in_16_bits(_by_lanes(_bfloat16(rows)), _bfloat16(matrix), 0, 1, bias, of_pairs)
    coded, group = _coded_rows(rows), _coded_group(matrix)
    in_8_bits(coded, codes_by_row(coded, len(rows)), len(rows), group, 0, 1, bias, of_fours)
    return bool((of_pairs == rows @ matrix.T).all() and (of_fours == rows @ matrix.T).all())


def _bfloat16(numbers: Any) -> Any:
    """Bits of whole numbers."""
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _by_lanes(numbers: Any) -> Any:
    """(blocks, words, LANES) of whole blocks of rows of numbers."""
    words = numbers.view(np.int32)
    return np.ascontiguousarray(words.reshape(-1, LANES, words.shape[1]).transpose(0, 2, 1))


def _coded_rows(numbers: Any) -> Any:
    """As `bough.model.cpu.operands` has rows in 8 bits, with scales of 1."""
    lines = numbers.reshape(len(numbers), -1, LINE)
    offsets = (-ZERO * lines.sum(axis=2, keepdims=True)).astype(np.int32)
    scales = np.ones_like(offsets, np.float32).view(np.int32)
    unused = np.zeros((*lines.shape[:2], PARTS), np.int32)
    words = np.concatenate((lines.astype(np.int8).view(np.int32), scales, offsets, unused), axis=2)
    return _by_lanes(words.reshape(len(numbers), -1)).view(np.uint32)


def _coded_group(numbers: Any) -> Any:
    """The same of a group of a matrix."""
    scales = np.ones((len(numbers), 1), np.float32).view(np.int32)
    return _by_lanes(np.concatenate(((numbers + ZERO).astype(np.uint8).view(np.int32), scales), axis=1))
