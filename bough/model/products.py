"""Products of a few rows with matrices that come from memory once: what a draft step on a CPU consists of.

A library's product of few rows waits for memory and for itself by turns, and lays the matrix out anew each time. Here
it is laid out once, in the order in which it is read, and read ahead of its use. Knows no models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from bough.model.attention import exp_below_zero
from bough.model.packed import rounded

LANES = 16  # outputs that one vector register holds, in float32
BLOCKS = 2  # registers of outputs that are computed together
WIDTH = LANES * BLOCKS  # outputs are padded to a multiple
MAX_ROWS = 16  # rows that share one reading of a matrix: so many registers hold their sums
PAIR_BYTES = 4  # two inputs that belong together, in bfloat16
_READ_AHEAD_BYTES = 2048

FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
compiled = numba.njit(fastmath=FASTMATH, cache=True, error_model="numpy")
parallel = numba.njit(fastmath=FASTMATH, cache=True, error_model="numpy", parallel=True)

_I32, _I64, _POINTER = ir.IntType(32), ir.IntType(64), ir.PointerType()
_FLOATS, _PAIRS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_I32, LANES)


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's type, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)


def packed(weight: torch.Tensor) -> torch.Tensor:
    """(outputs, inputs) bfloat16 as (outputs / LANES, inputs / 2, LANES) pairs of inputs, int32; padded to WIDTH.

    The order in which the kernels read it.
    """
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight.to(torch.bfloat16), (0, 0, 0, -outputs % WIDTH))
    pairs = padded.contiguous().view(torch.int32).view(-1, LANES, inputs // 2)
    return pairs.transpose(1, 2).contiguous()


def _has_bf16_products() -> bool:
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16", False))


def _widened(builder: ir.IRBuilder, pairs: Any) -> tuple[Any, Any]:
    """The first and the second of each pair as float32."""
    sixteen = ir.Constant(_PAIRS, [16] * LANES)
    upper = ir.Constant(_PAIRS, [0xFFFF0000] * LANES)
    first = builder.bitcast(builder.shl(pairs, sixteen), _FLOATS)
    return first, builder.bitcast(builder.and_(pairs, upper), _FLOATS)


def _dot(builder: ir.IRBuilder, sums: Any, weights: Any, inputs: Any) -> Any:
    """sums + the dot product of each pair, by one instruction where the processor has it."""
    if _has_bf16_products():
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _BFLOATS, _BFLOATS])
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        product = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(product, [sums, builder.bitcast(weights, _BFLOATS), builder.bitcast(inputs, _BFLOATS)])
    for weight, number in zip(_widened(builder, weights), _widened(builder, inputs), strict=True):
        sums = builder.fadd(sums, builder.fmul(weight, number, flags=["contract"]), flags=["contract"])
    return sums


def _splat(builder: ir.IRBuilder, number: Any) -> Any:
    one = builder.insert_element(ir.Constant(_PAIRS, ir.Undefined), number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(_PAIRS, ir.Undefined), ir.Constant(_PAIRS, [0] * LANES))


def _read_ahead(builder: ir.IRBuilder, address: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_POINTER, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    ahead = builder.gep(address, [ir.Constant(_I64, _READ_AHEAD_BYTES)], source_etype=ir.IntType(8))
    builder.call(
        prefetch, [builder.bitcast(ahead, _POINTER), ir.Constant(_I32, 0), ir.Constant(_I32, 3), ir.Constant(_I32, 1)]
    )


def _emit(builder: ir.IRBuilder, rows: int, blocks: int, inputs: Any, matrix: Any, num_pairs: Any, out: Any) -> None:
    """The loop over pairs, with all sums in registers."""

    def at(base: Any, offset: Any, kind: ir.Type = _I32) -> Any:
        return builder.gep(base, [offset], source_etype=kind)

    starts = [at(inputs, builder.mul(num_pairs, ir.Constant(_I64, row))) for row in range(rows)]
    streams = [at(matrix, builder.mul(num_pairs, ir.Constant(_I64, block)), _PAIRS) for block in range(blocks)]
    entry, body, done = builder.block, builder.append_basic_block("body"), builder.append_basic_block("done")
    builder.branch(body)
    builder.position_at_end(body)
    pair = builder.phi(_I64)
    pair.add_incoming(ir.Constant(_I64, 0), entry)
    phis = [builder.phi(_FLOATS) for _ in range(rows * blocks)]
    sums = list(phis)
    weights = []
    for stream in streams:
        address = at(stream, pair, _PAIRS)
        _read_ahead(builder, address)
        weights.append(builder.load(address, typ=_PAIRS, align=PAIR_BYTES))
    for row, start in enumerate(starts):
        number = _splat(builder, builder.load(at(start, pair), typ=_I32, align=PAIR_BYTES))
        for block in range(blocks):
            place = block * rows + row
            sums[place] = _dot(builder, sums[place], weights[block], number)
    following = builder.add(pair, ir.Constant(_I64, 1))
    builder.cbranch(builder.icmp_signed("<", following, num_pairs), body, done)
    pair.add_incoming(following, builder.block)
    for phi, total in zip(phis, sums, strict=True):
        phi.add_incoming(ir.Constant(_FLOATS, [0.0] * LANES), entry)
        phi.add_incoming(total, body)
    builder.position_at_end(done)
    for place, total in enumerate(sums):
        where = (place // rows * MAX_ROWS + place % rows) * LANES
        address = at(out, ir.Constant(_I64, where), ir.FloatType())
        builder.store(total, builder.bitcast(address, _FLOATS.as_pointer()), align=PAIR_BYTES)


def _multiplier(rows: int, blocks: int) -> Callable[..., Any]:
    """A function of arrays (inputs, first input pair, matrix, its first pair, pairs in a row, sums, their first)."""

    def multiply(_context, inputs, begin, matrix, offset, num_pairs, out, out_begin):  # type: ignore[no-untyped-def]
        signature = numba.types.void(inputs, begin, matrix, offset, num_pairs, out, out_begin)

        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            def pointer(place: int, shift: int, scale: int) -> Any:
                array = context.make_array(signature.args[place])(context, builder, arguments[place])
                step = builder.mul(arguments[shift], ir.Constant(_I64, scale))
                return builder.gep(array.data, [step], source_etype=ir.IntType(8))

            starts = pointer(0, 1, PAIR_BYTES), pointer(2, 3, PAIR_BYTES), arguments[4], pointer(5, 6, PAIR_BYTES)
            _emit(builder, rows, blocks, *starts)
            return context.get_dummy_value()

        return signature, codegen

    made: Callable[..., Any] = intrinsic(multiply)
    return made


_multiply_1 = _multiplier(1, BLOCKS)
_multiply_2 = _multiplier(2, BLOCKS)
_multiply_4 = _multiplier(4, BLOCKS)
_multiply_8 = _multiplier(8, BLOCKS)
_multiply_16 = _multiplier(MAX_ROWS, 1)


@compiled
def multiply(inputs, row, num_rows, matrix, offset, num_pairs, sums):  # type: ignore[no-untyped-def]
    """Rows [row, row + num_rows), at most MAX_ROWS, times WIDTH outputs, into sums (BLOCKS, MAX_ROWS, LANES) float32.

    inputs (rows, num_pairs) pairs, in whole multiples of MAX_ROWS rows; matrix is flat, its pairs from `offset` on.
    """
    begin = row * num_pairs
    if num_rows == 1:
        _multiply_1(inputs, begin, matrix, offset, num_pairs, sums, 0)
    elif num_rows == 2:
        _multiply_2(inputs, begin, matrix, offset, num_pairs, sums, 0)
    elif num_rows <= 4:
        _multiply_4(inputs, begin, matrix, offset, num_pairs, sums, 0)
    elif num_rows <= 8:
        _multiply_8(inputs, begin, matrix, offset, num_pairs, sums, 0)
    else:
        for block in range(BLOCKS):
            place = offset + block * num_pairs * LANES
            _multiply_16(inputs, begin, matrix, place, num_pairs, sums, block * MAX_ROWS * LANES)


@compiled
def _store(sums, row, num_rows, begin, bias, out):  # type: ignore[no-untyped-def]
    """A group's sums and their bias as rows of out (rows, outputs) float32."""
    for block in range(BLOCKS):
        first = begin + block * LANES
        for r in range(num_rows):
            if first + LANES <= out.shape[1]:
                for lane in range(LANES):
                    out[row + r, first + lane] = sums[block, r, lane] + bias[first + lane]
            else:
                for lane in range(out.shape[1] - first):
                    out[row + r, first + lane] = sums[block, r, lane] + bias[first + lane]


# Each of these is one reading of a matrix by all threads. A thread takes its share in one run, so that it reads ahead.


@parallel
def project(num_threads, inputs, num_rows, matrix, offset, num_pairs, bias, out):  # type: ignore[no-untyped-def]
    """out = inputs times a matrix, plus bias: out (rows, outputs), bias (outputs,) float32; the rest as `multiply`."""
    num_groups = (out.shape[1] + WIDTH - 1) // WIDTH
    for part in numba.prange(num_threads):
        sums = np.empty((BLOCKS, MAX_ROWS, LANES), np.float32)
        for group in range(part * num_groups // num_threads, (part + 1) * num_groups // num_threads):
            for row in range(0, num_rows, MAX_ROWS):
                count = min(MAX_ROWS, num_rows - row)
                multiply(inputs, row, count, matrix, offset + group * num_pairs * WIDTH, num_pairs, sums)
                _store(sums, row, count, group * WIDTH, bias, out)


@parallel
def project_onto(num_threads, inputs, num_rows, matrix, offset, num_pairs, out):  # type: ignore[no-untyped-def]
    """out += inputs times a matrix: the end of a branch beside the residual stream."""
    num_groups = (out.shape[1] + WIDTH - 1) // WIDTH
    for part in numba.prange(num_threads):
        sums = np.empty((BLOCKS, MAX_ROWS, LANES), np.float32)
        for group in range(part * num_groups // num_threads, (part + 1) * num_groups // num_threads):
            begin = group * WIDTH
            for row in range(0, num_rows, MAX_ROWS):
                count = min(MAX_ROWS, num_rows - row)
                multiply(inputs, row, count, matrix, offset + begin * num_pairs, num_pairs, sums)
                for block in range(BLOCKS):
                    first = begin + block * LANES
                    for r in range(count):
                        for lane in range(min(LANES, out.shape[1] - first)):
                            out[row + r, first + lane] += sums[block, r, lane]


@parallel
def project_gated(num_threads, inputs, num_rows, matrix, offset, num_pairs, out):  # type: ignore[no-untyped-def]
    """out = silu(gate) * up in bfloat16's bits, (rows, outputs) uint16; blocks of gate and up stand by turns."""
    num_groups = (out.shape[1] + LANES - 1) // LANES
    for part in numba.prange(num_threads):
        sums = np.empty((BLOCKS, MAX_ROWS, LANES), np.float32)
        for group in range(part * num_groups // num_threads, (part + 1) * num_groups // num_threads):
            first = group * LANES
            for row in range(0, num_rows, MAX_ROWS):
                count = min(MAX_ROWS, num_rows - row)
                multiply(inputs, row, count, matrix, offset + group * num_pairs * WIDTH, num_pairs, sums)
                for r in range(count):
                    for lane in range(LANES):
                        gate = sums[0, r, lane]
                        power = exp_below_zero(-abs(gate))
                        sums[0, r, lane] *= sums[1, r, lane] * (np.float32(1) if gate > 0 else power)
                        sums[0, r, lane] /= np.float32(1) + power
                    for lane in range(min(LANES, out.shape[1] - first)):
                        out[row + r, first + lane] = rounded(sums[0, r, lane])
