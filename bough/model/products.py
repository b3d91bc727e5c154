"""Products of a few rows with matrices that come from memory once: what a draft step on a CPU consists of.

A library's product of few rows waits for memory and for itself by turns, and lays the matrix out anew each time. Here
it is laid out once, in the order in which it is read, and read ahead of its use. Knows no models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.extending import intrinsic

from bough.model.attention_cpu import exp_below_zero
from bough.model.packed import rounded
from bough.model.vectors import FIRST_LEVEL, FLOATS, I32, I64, LANES, WORDS, at, dot_pairs, prefetch, splat

BLOCKS = 2  # registers of outputs that are computed together
WIDTH = LANES * BLOCKS  # outputs are padded to a multiple
MAX_ROWS = 16  # rows that share one reading of a matrix: so many registers hold their sums
PAIR_BYTES = 4  # two inputs that belong together, in bfloat16
_READ_AHEAD_BYTES = 4096

FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
compiled = numba.njit(fastmath=FASTMATH, cache=True, error_model="numpy")
parallel = numba.njit(fastmath=FASTMATH, cache=True, error_model="numpy", parallel=True)


def packed(weight: torch.Tensor) -> torch.Tensor:
    """(outputs, inputs) bfloat16 as (outputs / LANES, inputs / 2, LANES) pairs of inputs, int32; padded to WIDTH.

    The order in which the kernels read it.
    """
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight.to(torch.bfloat16), (0, 0, 0, -outputs % WIDTH))
    pairs = padded.contiguous().view(torch.int32).view(-1, LANES, inputs // 2)
    return pairs.transpose(1, 2).contiguous()


def _emit(builder: ir.IRBuilder, rows: int, blocks: int, inputs: Any, matrix: Any, num_pairs: Any, out: _Out) -> None:
    """The loop over pairs, with all sums in registers."""

    def entry_of(base: Any, index: Any, kind: ir.Type = I32) -> Any:
        return builder.gep(base, [index], source_etype=kind)

    starts = [entry_of(inputs, builder.mul(num_pairs, ir.Constant(I64, row))) for row in range(rows)]
    streams = [entry_of(matrix, builder.mul(num_pairs, ir.Constant(I64, block)), WORDS) for block in range(blocks)]
    places = [out.place(builder, row, block) for block in range(blocks) for row in range(rows)]
    begins = [builder.load(place, typ=FLOATS, align=PAIR_BYTES) for place in places]
    entry, body, done = builder.block, builder.append_basic_block("body"), builder.append_basic_block("done")
    builder.branch(body)
    builder.position_at_end(body)
    pair = builder.phi(I64)
    pair.add_incoming(ir.Constant(I64, 0), entry)
    phis = [builder.phi(FLOATS) for _ in places]
    sums = list(phis)
    weights = []
    for stream in streams:
        address = entry_of(stream, pair, WORDS)
        prefetch(builder, at(builder, address, ir.Constant(I64, _READ_AHEAD_BYTES)), FIRST_LEVEL)
        weights.append(builder.load(address, typ=WORDS, align=PAIR_BYTES))
    for row, start in enumerate(starts):
        number = splat(builder, builder.load(entry_of(start, pair), typ=I32, align=PAIR_BYTES))
        for block in range(blocks):
            place = block * rows + row
            sums[place] = dot_pairs(builder, sums[place], weights[block], number)
    following = builder.add(pair, ir.Constant(I64, 1))
    builder.cbranch(builder.icmp_signed("<", following, num_pairs), body, done)
    pair.add_incoming(following, builder.block)
    for phi, begin, total in zip(phis, begins, sums, strict=True):
        phi.add_incoming(begin, entry)
        phi.add_incoming(total, body)
    builder.position_at_end(done)
    for place, total in zip(places, sums, strict=True):
        builder.store(total, place, align=PAIR_BYTES)


class _Out(NamedTuple):
    """Where sums go, as values of the code that is made."""

    base: Any
    row_stride: Any  # in floats
    block_stride: Any

    def place(self, builder: ir.IRBuilder, row: int, block: int) -> Any:
        """Address of the sums of one row and block."""
        steps = (builder.mul(s, ir.Constant(I64, n)) for s, n in ((self.row_stride, row), (self.block_stride, block)))
        address = builder.gep(self.base, [builder.add(*steps)], source_etype=ir.FloatType())
        return builder.bitcast(address, FLOATS.as_pointer())


def _multiplier(rows: int, blocks: int) -> Callable[..., Any]:
    """`multiply` for one number of rows and blocks, with the first input given as a pair."""

    def multiply(_context, inputs, begin, matrix, offset, num_pairs, out, out_begin, row_stride, block_stride):  # type: ignore[no-untyped-def]
        arguments = inputs, begin, matrix, offset, num_pairs, out, out_begin, row_stride, block_stride
        signature = numba.types.void(*arguments)

        def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
            def pointer(place: int, shift: int) -> Any:
                array = context.make_array(signature.args[place])(context, builder, values[place])
                step = builder.mul(values[shift], ir.Constant(I64, PAIR_BYTES))  # as many as of a float32
                return builder.gep(array.data, [step], source_etype=ir.IntType(8))

            out = _Out(pointer(5, 6), values[7], values[8])
            _emit(builder, rows, blocks, pointer(0, 1), pointer(2, 3), values[4], out)
            return context.get_dummy_value()

        return signature, codegen

    made: Callable[..., Any] = intrinsic(multiply)
    return made


_multiply_1 = _multiplier(1, BLOCKS)
_multiply_2 = _multiplier(2, BLOCKS)
_multiply_4 = _multiplier(4, BLOCKS)
_multiply_8 = _multiplier(8, BLOCKS)
_multiply_12 = _multiplier(12, 1)
_multiply_16 = _multiplier(MAX_ROWS, 1)


@compiled
def multiply(inputs, row, num_rows, matrix, offset, num_pairs, out, begin, row_stride, block_stride):  # type: ignore[no-untyped-def]
    """Adds rows [row, row + num_rows), at most MAX_ROWS, times WIDTH outputs to `out`.

    inputs (rows, num_pairs) pairs, matrix flat with its pairs from `offset` on, out float32 from `begin` on. Both have
    room for a multiple of MAX_ROWS rows: what is in rows beyond those that are asked for is of no meaning.
    """
    first = row * num_pairs
    if num_rows == 1:
        _multiply_1(inputs, first, matrix, offset, num_pairs, out, begin, row_stride, block_stride)
    elif num_rows == 2:
        _multiply_2(inputs, first, matrix, offset, num_pairs, out, begin, row_stride, block_stride)
    elif num_rows <= 4:
        _multiply_4(inputs, first, matrix, offset, num_pairs, out, begin, row_stride, block_stride)
    elif num_rows <= 8:
        _multiply_8(inputs, first, matrix, offset, num_pairs, out, begin, row_stride, block_stride)
    else:
        for block in range(BLOCKS):
            place, there = offset + block * num_pairs * LANES, begin + block * block_stride
            if num_rows <= 12:
                _multiply_12(inputs, first, matrix, place, num_pairs, out, there, row_stride, block_stride)
            else:
                _multiply_16(inputs, first, matrix, place, num_pairs, out, there, row_stride, block_stride)


@compiled
def multiply_groups(inputs, num_rows, matrix, offset, num_pairs, out, first, last, step, block_stride):  # type: ignore[no-untyped-def]
    """`multiply` of all rows with groups [first, last) of a matrix, `step` columns apart in `out` (rows, columns)."""
    width = out.shape[1]
    for group in range(first, last):
        for row in range(0, num_rows, MAX_ROWS):
            count, place = min(MAX_ROWS, num_rows - row), offset + group * num_pairs * WIDTH
            begin = row * width + group * step
            multiply(inputs, row, count, matrix, place, num_pairs, out, begin, width, block_stride)


# Each of these is one reading of a matrix by all threads. A thread takes its share in one run, so that it reads ahead.


@parallel
def project(num_threads, inputs, num_rows, matrix, offset, num_pairs, bias, out):  # type: ignore[no-untyped-def]
    """out = inputs times a matrix, plus bias: out (rows, outputs), bias (outputs,) float32, outputs in whole groups."""
    num_groups = out.shape[1] // WIDTH
    for part in numba.prange(num_threads):
        first, last = part * num_groups // num_threads, (part + 1) * num_groups // num_threads
        for row in range(num_rows):
            out[row, first * WIDTH : last * WIDTH] = bias[first * WIDTH : last * WIDTH]
        multiply_groups(inputs, num_rows, matrix, offset, num_pairs, out, first, last, WIDTH, LANES)


@parallel
def project_onto(num_threads, inputs, num_rows, matrix, offset, num_pairs, out):  # type: ignore[no-untyped-def]
    """out += inputs times a matrix: the end of a branch beside the residual stream."""
    num_groups = out.shape[1] // WIDTH
    for part in numba.prange(num_threads):
        first, last = part * num_groups // num_threads, (part + 1) * num_groups // num_threads
        multiply_groups(inputs, num_rows, matrix, offset, num_pairs, out, first, last, WIDTH, LANES)


@compiled
def _gate(gate, up, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        power = exp_below_zero(-abs(gate[i]))
        out[i] = rounded(gate[i] * up[i] * (np.float32(1) if gate[i] > 0 else power) / (np.float32(1) + power))


@parallel
def project_gated(num_threads, inputs, num_rows, matrix, offset, num_pairs, both, out):  # type: ignore[no-untyped-def]
    """out = silu(gate) * up in bfloat16's bits, (rows, outputs) uint16; blocks of gate and up stand by turns.

    both (rows, 2 * outputs) float32 takes the two.
    """
    size = out.shape[1]
    num_groups = size // LANES
    for part in numba.prange(num_threads):
        first, last = part * num_groups // num_threads, (part + 1) * num_groups // num_threads
        for row in range(num_rows):
            both[row, first * LANES : last * LANES] = 0
            both[row, size + first * LANES : size + last * LANES] = 0
        multiply_groups(inputs, num_rows, matrix, offset, num_pairs, both, first, last, LANES, size)
        for row in range(num_rows):
            begin, end = first * LANES, last * LANES
            _gate(both[row, begin:end], both[row, size + begin : size + end], out[row, begin:end])
