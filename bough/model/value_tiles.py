"""Weights times values, for attention in compiled code: pairs of keys, as two bfloat16 in one word."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from bough.model.tiles import WORD_BYTES, compiled
from bough.model.vectors import FLOATS, I16, I32, I64, LANES, WORDS, at, dot_pairs, shuffled, splat, store

WIDTH = 2 * LANES  # dimensions of a head that are computed together
ROWS = LANES // 2  # and rows
_QUARTERS = range(4)  # of a register: pairs are made within them, which takes the least


def _sums(b: ir.IRBuilder, weight: Any, pair_bytes: Any, value: Any, key_bytes: Any, num_pairs: Any) -> list[Any]:
    """For each row two vectors: of the first halves of all quarters of the dimensions, and of their second halves."""
    halves = [
        [8 * q + 4 * half + d + key * WIDTH for q in _QUARTERS for d in range(4) for key in range(2)]
        for half in range(2)
    ]
    zeros, places = ir.Constant(FLOATS, [0.0] * LANES), [(row, half) for row in range(ROWS) for half in range(2)]
    entry, body, done = b.block, b.append_basic_block("pair"), b.append_basic_block("done")
    b.cbranch(b.icmp_signed("<", ir.Constant(I64, 0), num_pairs), body, done)
    b.position_at_end(body)
    pair, begins = b.phi(I64), [b.phi(FLOATS) for _ in places]
    first = at(b, value, b.mul(b.shl(pair, ir.Constant(I64, 1)), key_bytes))
    one, other = (b.load(key, typ=ir.VectorType(I16, WIDTH), align=2) for key in (first, at(b, first, key_bytes)))
    words = [b.bitcast(shuffled(b, one, other, half), WORDS) for half in halves]
    here = at(b, weight, b.mul(pair, pair_bytes))
    loads = [b.load(at(b, here, ir.Constant(I64, WORD_BYTES * row)), typ=I32, align=WORD_BYTES) for row in range(ROWS)]
    numbers = [splat(b, number) for number in loads]
    sums = [dot_pairs(b, begin, words[half], numbers[row]) for begin, (row, half) in zip(begins, places, strict=True)]
    following = b.add(pair, ir.Constant(I64, 1))
    b.cbranch(b.icmp_signed("<", following, num_pairs), body, done)
    pair.add_incoming(ir.Constant(I64, 0), entry)
    pair.add_incoming(following, body)
    b.position_at_end(done)
    results = [b.phi(FLOATS) for _ in places]
    for result, begin, total in zip(results, begins, sums, strict=True):
        begin.add_incoming(zeros, entry)
        begin.add_incoming(total, body)
        result.add_incoming(zeros, entry)
        result.add_incoming(total, body)
    return results


def _add(b: ir.IRBuilder, first: Any, second: Any, out: Any) -> None:
    """Adds a row's halves to `out`, dimension by dimension again."""
    for place in range(2):
        quarters = _QUARTERS[2 * place : 2 * place + 2]
        order = [4 * q + d + LANES * half for q in quarters for half in range(2) for d in range(4)]
        address = at(b, out, ir.Constant(I64, 4 * LANES * place))
        store(b, b.fadd(b.load(address, typ=FLOATS, align=4), shuffled(b, first, second, order)), address)


def _tile(_context, weights, block, row, pair, values, column, out):  # type: ignore[no-untyped-def]
    """ROWS by WIDTH of `weigh_values`, from a block's row and a column on."""
    signature = numba.types.void(weights, block, row, pair, values, column, out)

    def codegen(context, builder, signature, given):  # type: ignore[no-untyped-def]
        def made(place: int) -> Any:
            return context.make_array(signature.args[place])(context, builder, given[place])

        def entry(place: int, *indices: ir.Value) -> tuple[ir.Value, ir.Value]:
            """Its address, and bytes from it to the next along the last axis but one."""
            steps, address = cgutils.unpack_tuple(builder, made(place).strides), made(place).data
            for index, step in zip(indices, steps, strict=True):
                address = at(builder, address, builder.mul(index, step))
            return address, steps[-2]

        _, block, row, pair, _, column, _ = given
        weight, pair_bytes = entry(0, block, pair, row)
        value, key_bytes = entry(4, ir.Constant(I64, 0), column)
        out, row_bytes = entry(6, builder.add(builder.mul(block, ir.Constant(I64, LANES)), row), column)
        num_pairs = builder.lshr(cgutils.unpack_tuple(builder, made(4).shape)[0], ir.Constant(I64, 1))
        sums = _sums(builder, weight, pair_bytes, value, key_bytes, num_pairs)
        for index in range(ROWS):
            address = at(builder, out, builder.mul(row_bytes, ir.Constant(I64, index)))
            _add(builder, sums[2 * index], sums[2 * index + 1], address)
        return context.get_dummy_value()

    return signature, codegen


_weigh: Any = intrinsic(_tile)


@compiled
def weigh_values(weights, pair, values, num_rows, out):  # type: ignore[no-untyped-def]
    """out += weights times values.

    weights (blocks, pairs of keys, LANES) words of two bfloat16, of which the pairs from `pair` on belong to the values
    (keys, WIDTHs of dimensions), an even number of bfloat16's bits; out (rows in whole blocks, dimensions) float32.
    """
    for begin in range(0, num_rows, ROWS):
        for column in range(0, values.shape[1], WIDTH):
            _weigh(weights, begin // LANES, begin % LANES, pair, values, column, out)
