"""Products of rows with matrices as a checkpoint keeps them, in which no row knows of any other.

A library's product rounds differently for different numbers of rows, because it goes about them differently. Here each
number of the result is one sum, added up in the order of its inputs whatever else is computed: the same bits for one
row and for a thousand, at any place. So nothing need be padded for the sake of bits. Knows no models.

Rows are the lanes of vectors: sixteen of them meet one number of the matrix at a time, which is then read where it
stands, once for all rows. On few rows that wastes lanes, but reading the matrix from memory takes as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from bough.model.shares import counter, take
from bough.model.vectors import (
    FLOATS,
    I16,
    I32,
    I64,
    LANES,
    SECOND_LEVEL,
    WORDS,
    at,
    dot_pairs,
    has_feature,
    multiply_add,
    prefetch,
    shuffled,
    splat,
)

WORD_BYTES = 4  # a float32, or two neighbouring bfloat16, which one instruction multiplies and adds
LINE_BYTES = 64  # of memory that arrive together
PIECES = 8  # of the matrix for each thread, which they take as they come to them
GROUP = 8  # outputs that are computed together
NEEDED = {torch.bfloat16: "avx512bf16", torch.float32: "avx512f"}  # features of a processor


def can_multiply(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether this processor has what it takes for matrices (outputs, inputs) of a shape and type."""
    outputs, inputs = shape
    is_whole = outputs >= GROUP and inputs * dtype.itemsize % LINE_BYTES == 0
    return is_whole and dtype in NEEDED and has_feature(NEEDED[dtype])


def multiply(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """(..., outputs) rows times a matrix, plus bias, rounded once; on the threads that numba has.

    rows (..., inputs), matrix (outputs, inputs) contiguous, bias (outputs,), of one type that `can_multiply` allows.
    """
    outputs = matrix.shape[0]
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    words = flat.view(torch.int32).numpy() if flat.dtype == torch.bfloat16 else flat.numpy()
    blocks = np.empty((-(-len(words) // LANES), words.shape[1], LANES), words.dtype)
    out = torch.empty(len(blocks) * LANES, outputs, dtype=rows.dtype)
    added = np.zeros(outputs, np.float32) if bias is None else bias.float().numpy()
    _multiply(counter(), numba.get_num_threads(), words, blocks, _numbers(matrix), added, _numbers(out))
    return out[: len(words)].view(*rows.shape[:-1], outputs)


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _rounded(builder: ir.IRBuilder, floats: Any) -> Any:
    """To the bits of bfloat16, to nearest and even."""

    def constant(number: int) -> ir.Constant:
        return ir.Constant(WORDS, [number] * LANES)

    bits = builder.bitcast(floats, WORDS)
    is_odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    upper = builder.lshr(builder.add(bits, builder.add(is_odd, constant(0x7FFF))), constant(16))
    return builder.trunc(upper, ir.VectorType(I16, LANES))


def _by_rows(builder: ir.IRBuilder, outputs: Sequence[Any]) -> Any:
    """One vector of all outputs of the first row, then of the second, and so on, from one vector for each output."""
    vectors, width = list(outputs), 1  # outputs of a row that stand together
    while len(vectors) > 1:
        size = LANES * width
        pairs = [
            place
            for row in range(0, size, width)
            for begin in (row, size + row)
            for place in range(begin, begin + width)
        ]
        vectors = [shuffled(builder, *two, pairs) for two in zip(vectors[::2], vectors[1::2], strict=True)]
        width *= 2
    return vectors[0]


def _times(builder: ir.IRBuilder, number: int, size: Any) -> Any:
    return builder.mul(size, ir.Constant(I64, number))


class _Tile:
    """The code for some blocks of rows with some rows of the matrix: all its sums stay in registers."""

    def __init__(self, builder: ir.IRBuilder, num_blocks: int, num_outputs: int, is_bf16: bool) -> None:
        self._builder, self._is_bf16 = builder, is_bf16
        self._blocks, self._outputs = range(num_blocks), range(num_outputs)

    def sums(self, rows: Any, block_bytes: Any, matrix: Any, matrix_row_bytes: Any) -> list[Any]:
        """Vectors of sums, block by block and in each output by output, line by line of the matrix."""
        b, num_sums = self._builder, len(self._blocks) * len(self._outputs)
        blocks = [at(b, rows, _times(b, block, block_bytes)) for block in self._blocks]
        weights = [at(b, matrix, _times(b, output, matrix_row_bytes)) for output in self._outputs]
        ahead = _times(b, len(self._outputs), matrix_row_bytes)  # what the next tile will want
        entry, line, word, after, done = b.block, *(b.append_basic_block(n) for n in ("line", "word", "after", "done"))
        b.branch(line)
        b.position_at_end(line)
        line_offset, line_sums = b.phi(I64), [b.phi(FLOATS) for _ in range(num_sums)]
        for row in weights:
            # The first level of caches would wait for fewer lines at a time than memory can send.
            prefetch(b, at(b, at(b, row, line_offset), ahead), SECOND_LEVEL)
        line_end = b.add(line_offset, ir.Constant(I64, LINE_BYTES))
        b.branch(word)
        b.position_at_end(word)
        offset, begins = b.phi(I64), [b.phi(FLOATS) for _ in range(num_sums)]
        inputs = [b.load(at(b, block, _times(b, LANES, offset)), typ=WORDS, align=WORD_BYTES) for block in blocks]
        numbers = [splat(b, b.load(at(b, row, offset), typ=I32, align=2)) for row in weights]
        pairs = [(some, number) for some in inputs for number in numbers]
        add = dot_pairs if self._is_bf16 else multiply_add
        sums = [add(b, begin, *pair) for begin, pair in zip(begins, pairs, strict=True)]
        following = b.add(offset, ir.Constant(I64, WORD_BYTES))
        b.cbranch(b.icmp_signed("<", following, line_end), word, after)
        b.position_at_end(after)
        b.cbranch(b.icmp_signed("<", line_end, matrix_row_bytes), line, done)
        b.position_at_end(done)
        zeros = [ir.Constant(FLOATS, [0.0] * LANES)] * num_sums
        before = [(line_offset, ir.Constant(I64, 0), line_end), *zip(line_sums, zeros, sums, strict=True)]
        for phi, begin, end in before:
            phi.add_incoming(begin, entry)
            phi.add_incoming(end, after)
        within = [(offset, line_offset, following), *zip(begins, line_sums, sums, strict=True)]
        for phi, begin, end in within:
            phi.add_incoming(begin, line)
            phi.add_incoming(end, word)
        return sums

    def put(self, sums: Sequence[Any], bias: Any, out: Any, out_row_bytes: Any) -> None:
        """Adds the bias, rounds and stores."""
        b, size = self._builder, len(self._outputs)
        places = [at(b, bias, ir.Constant(I64, 4 * output)) for output in self._outputs]
        added = [splat(b, b.load(place, typ=ir.FloatType(), align=4)) for place in places]
        for block in self._blocks:
            totals = [b.fadd(*two) for two in zip(sums[block * size : (block + 1) * size], added, strict=True)]
            together = _by_rows(b, [_rounded(b, total) if self._is_bf16 else total for total in totals])
            for row in range(LANES):
                part = shuffled(b, together, together, range(row * size, (row + 1) * size))
                place = at(b, out, _times(b, block * LANES + row, out_row_bytes))
                b.store(part, b.bitcast(place, part.type.as_pointer()), align=2)


def _tile_of(num_blocks: int, num_outputs: int) -> Any:
    """A function that compiled code may call."""

    def tile(_context, blocks, block, matrix, output, bias, out):  # type: ignore[no-untyped-def]
        """out[LANES * block:, output:] as far as a tile reaches."""
        arguments = blocks, block, matrix, output, bias, out
        signature = numba.types.void(*arguments)

        def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
            _, block, _, output, _, _ = values

            def array(place: int) -> tuple[Any, Any]:
                """Address and bytes from one entry to the next, of a contiguous array."""
                made = context.make_array(signature.args[place])(context, builder, values[place])
                return made.data, cgutils.unpack_tuple(builder, made.strides)[0]

            def entry(begin: Any, stride: Any, index: Any) -> Any:
                return at(builder, begin, builder.mul(stride, index))

            (rows, block_bytes), (weights, row_bytes), (added, float_bytes) = array(0), array(2), array(4)
            result, out_row_bytes = array(5)
            is_bf16 = signature.args[5].dtype == numba.types.uint16
            first = builder.mul(output, ir.Constant(I64, 2 if is_bf16 else 4))
            result = at(builder, entry(result, out_row_bytes, _times(builder, LANES, block)), first)
            made = _Tile(builder, num_blocks, num_outputs, is_bf16)
            sums = made.sums(entry(rows, block_bytes, block), block_bytes, entry(weights, row_bytes, output), row_bytes)
            made.put(sums, entry(added, float_bytes, output), result, out_row_bytes)
            return context.get_dummy_value()

        return signature, codegen

    return intrinsic(tile)


_tile_1, _tile_2, _tile_4 = _tile_of(1, GROUP), _tile_of(2, GROUP), _tile_of(4, GROUP // 2)
_compiled = numba.njit(cache=True, error_model="numpy", nogil=True)


@_compiled
def _lay_out(words, block, blocks):  # type: ignore[no-untyped-def]
    """A block of rows, word by word for all of them; beyond the last row zeros."""
    begin, num_rows = block * LANES, len(words)
    for word in range(words.shape[1]):
        for lane in range(LANES):
            row = begin + lane
            blocks[block, word, lane] = words[row, word] if row < num_rows else 0


@_compiled
def _multiply_groups(blocks, matrix, begin, end, bias, out):  # type: ignore[no-untyped-def]
    """All rows with some groups of the matrix's."""
    num_blocks = len(blocks)
    for group in range(begin, end):
        output = min(group * GROUP, len(matrix) - GROUP)  # the last group may compute again what others did
        block = 0
        while block + 4 <= num_blocks:
            _tile_4(blocks, block, matrix, output, bias, out)
            _tile_4(blocks, block, matrix, output + GROUP // 2, bias, out)
            block += 4
        if block + 2 <= num_blocks:
            _tile_2(blocks, block, matrix, output, bias, out)
            block += 2
        if block < num_blocks:
            _tile_1(blocks, block, matrix, output, bias, out)


@numba.njit(cache=True, error_model="numpy", parallel=True, nogil=True)
def _multiply(taken, num_threads, words, blocks, matrix, bias, out):  # type: ignore[no-untyped-def]
    """words (rows, words), blocks (blocks, words, LANES), matrix (outputs, inputs), bias and out as in `multiply`.

    bfloat16 as uint16, in words as int32 of two. `taken` counts the pieces of the matrix that threads have taken.
    """
    num_blocks = len(blocks)
    if num_blocks == 1:  # not worth a thread
        _lay_out(words, 0, blocks)
    else:
        for block in numba.prange(num_blocks):
            _lay_out(words, block, blocks)
    num_groups = (len(matrix) + GROUP - 1) // GROUP
    num_pieces = min(num_groups, PIECES * num_threads)
    for _thread in numba.prange(num_threads):
        piece = take(taken)
        while piece < num_pieces:
            begin, end = piece * num_groups // num_pieces, (piece + 1) * num_groups // num_pieces
            _multiply_groups(blocks, matrix, begin, end, bias, out)
            piece = take(taken)
