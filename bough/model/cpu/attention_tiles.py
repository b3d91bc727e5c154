"""What attention does with scores, in compiled code: weights of them, and weights times values. Rows are lanes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic, overload

from bough.model.cpu.attention_scores import INDEX_BYTES, KEYS_AHEAD, ROWS
from bough.model.cpu.float_bits import rounded
from bough.model.cpu.gemm import WORD_BYTES
from bough.model.cpu.jit import strict, strict_inner
from bough.model.cpu.llvm_vectors import (
    FIRST_LEVEL,
    FLOATS,
    I32,
    I64,
    LANES,
    NUM_VECTORS,
    SHORT,
    array_of,
    at,
    exp_below_zero,
    multiply_add,
    prefetch,
    shuffled,
    spaced,
    splat,
    store,
    widened,
)
from bough.model.cpu.simd import all_lanes, larger, load
from bough.model.cpu.simd import exp_below_zero as exp
from bough.model.cpu.simd import store as put

_LENGTH = LANES if NUM_VECTORS > 16 else SHORT  # of one register
_SUMS = ir.VectorType(ir.FloatType(), _LENGTH)
_COLUMNS = 2 * _LENGTH  # dimensions of a head that are computed together
_MANY = ROWS  # and rows, whose sums are half of what registers hold
_FEW = _MANY // 2  # of one token few heads share their keys


def _weigher_of(num_lanes: int) -> Any:
    """A function that compiled code may call, for keys of so many lanes; see `weigh_scores`."""

    def weights(_context: Any, scores: Any, peaks: Any, totals: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            (begin, _, (size,)), (peaks, _, _), (out, _, _) = (
                array_of(context, builder, signature.args[place], given[place]) for place in range(3)
            )
            peak = builder.load(peaks, typ=FLOATS, align=4)
            few = ir.VectorType(ir.FloatType(), num_lanes)
            held = cgutils.alloca_once(builder, few)
            builder.store(builder.load(out, typ=few, align=4), held)
            step = ir.Constant(I64, LANES)
            with cgutils.for_range_slice(builder, ir.Constant(I64, 0), size, step) as (number, _):
                place = at(builder, begin, builder.mul(number, ir.Constant(I64, WORD_BYTES)))
                weight = exp_below_zero(builder, builder.fsub(builder.load(place, typ=FLOATS, align=4), peak))
                store(builder, weight, place)
                for lane in range(0, LANES, num_lanes):  # of one key after another
                    own = shuffled(builder, weight, weight, range(lane, lane + num_lanes))
                    builder.store(builder.fadd(builder.load(held), own), held)
            store(builder, builder.load(held), out)
            return context.get_dummy_value()

        return numba.types.void(scores, peaks, totals), codegen

    return intrinsic(weights)


_weigh_4, _weigh_8, _weigh_16 = map(_weigher_of, (4, 8, LANES))


@strict_inner
def lanes_of(num_rows: Any) -> Any:
    """So many lanes have the keys of some rows: no more than LANES, where rows then fill several blocks."""
    lanes = LANES
    while lanes // 2 >= max(ROWS, num_rows):
        lanes //= 2
    return lanes


@strict
def weigh_scores(scores: Any, scale: Any, softcap: Any, sinks: Any, totals: Any) -> Any:
    """Scores (keys, lanes) become weights; `totals` (lanes,) takes their sums, key by key after the sinks' weights.

    Scores one after another in memory, keys in whole GROUPs, lanes of `lanes_of`. Sinks (LANES,), the same for every
    key that a vector has, weigh along.
    """
    flat, lanes = scores.reshape(scores.size), scores.shape[1]
    peak, factor, peaks = load(sinks, 0), all_lanes(scale), np.empty(LANES, np.float32)
    for begin in range(0, len(flat), LANES):
        put(flat, begin, load(flat, begin) * factor)
    if softcap > 0:
        for place in range(len(flat)):
            if flat[place] > -np.inf:
                flat[place] = softcap * np.tanh(flat[place] / softcap)
    for begin in range(0, len(flat), LANES):
        peak = larger(peak, load(flat, begin))
    put(peaks, 0, peak)
    for place in range(lanes, LANES):
        peaks[place % lanes] = max(peaks[place % lanes], peaks[place])
    for place in range(lanes, LANES):
        peaks[place] = peaks[place % lanes]
    weights_of_sinks = np.empty(LANES, np.float32)
    put(weights_of_sinks, 0, exp(load(sinks, 0) - load(peaks, 0)))
    for lane in range(lanes):  # a slice to a slice has a check of shapes, which takes seconds to compile
        totals[lane] = weights_of_sinks[lane]
    if lanes == 4:
        _weigh_4(flat, peaks, totals)
    elif lanes == 8:
        _weigh_8(flat, peaks, totals)
    else:
        _weigh_16(flat, peaks, totals)


class _Pair:
    """_COLUMNS numbers in two vectors: those of bfloat16, which come by twos, are in even and odd places."""

    def __init__(self, builder: ir.IRBuilder, is_bf16: bool) -> None:
        self._builder, self._is_bf16 = builder, is_bf16

    def values(self, address: Any) -> tuple[Any, Any]:
        """From memory, as float32."""
        b = self._builder
        if self._is_bf16:
            return widened(b, b.load(address, typ=ir.VectorType(I32, _LENGTH), align=2))
        addresses = (at(b, address, ir.Constant(I64, offset)) for offset in (0, WORD_BYTES * _LENGTH))
        first, second = (b.load(one, typ=_SUMS, align=2) for one in addresses)
        return first, second

    def put(self, first: Any, second: Any, address: Any) -> None:
        """Into float32 in memory, in their order."""
        b = self._builder
        if self._is_bf16:
            by_turns = [place for pair in zip(range(_LENGTH), range(_LENGTH, _COLUMNS), strict=True) for place in pair]
            halves = by_turns[:_LENGTH], by_turns[_LENGTH:]
            first, second = (shuffled(b, first, second, half) for half in halves)
        store(b, first, address)
        store(b, second, at(b, address, ir.Constant(I64, WORD_BYTES * _LENGTH)))


def _tile_of(num_rows: int) -> Any:
    """A function that compiled code may call: as many rows by _COLUMNS, from a block's row and a column on."""

    def tile(
        _context: Any,
        weights: Any,
        block: Any,
        row: Any,
        values: Any,
        column: Any,
        kept: Any,
        num_first: Any,
        num_keys: Any,
        out: Any,
    ) -> Any:
        types = weights, block, row, values, column, kept, num_first, num_keys, out
        return numba.types.void(*types), partial(_weigh_keys, num_rows)

    return intrinsic(tile)


def _weigh_keys(num_rows: int, context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Any]) -> Any:
    """The code of a tile: keys one after another, with all sums in registers."""
    b, (_, block, row, _, column, _, num_first, num_keys, _) = builder, given
    arrays = {place: array_of(context, b, signature.args[place], given[place]) for place in (0, 3, 5, 8)}

    def number(count: int) -> ir.Value:
        return ir.Constant(I64, count)

    (weights, weight_steps, (_, _, lanes)), (values, value_steps, _) = arrays[0], arrays[3]
    for index, step in zip((block, number(0), row), weight_steps, strict=True):
        weights = at(b, weights, b.mul(index, step))
    values, form = at(b, values, b.mul(column, value_steps[1])), _Pair(b, signature.args[3].dtype == numba.types.uint16)
    held = [cgutils.alloca_once(b, _SUMS) for _ in range(2 * num_rows)]
    for sums in held:
        b.store(ir.Constant(_SUMS, [0.0] * _LENGTH), sums)

    def add_key(key: Any, value: Any) -> None:
        pair, here = form.values(value), at(b, weights, b.mul(key, weight_steps[1]))
        for place in range(num_rows):
            weight = b.load(at(b, here, number(WORD_BYTES * place)), typ=I32, align=WORD_BYTES)
            for sums, some in zip(held[2 * place : 2 * place + 2], pair, strict=True):
                b.store(multiply_add(b, b.load(sums), some, splat(b, weight, _LENGTH)), sums)

    order = arrays[5][0]
    first = at(b, values, b.mul(b.load(order, typ=I64, align=INDEX_BYTES), value_steps[0]))
    with cgutils.for_range(b, num_first) as key:
        here = at(b, first, b.mul(key.index, value_steps[0]))
        prefetch(b, at(b, here, b.mul(number(KEYS_AHEAD), value_steps[0])), FIRST_LEVEL)
        add_key(key.index, here)
    with cgutils.for_range(b, b.sub(num_keys, num_first)) as key:
        which = b.add(num_first, key.index)
        place = b.load(at(b, order, b.mul(which, number(INDEX_BYTES))), typ=I64, align=INDEX_BYTES)
        add_key(which, at(b, values, b.mul(place, value_steps[0])))
    out, (row_bytes, _), _ = arrays[8]
    out = at(b, at(b, out, b.mul(b.add(b.mul(block, lanes), row), row_bytes)), b.mul(column, number(WORD_BYTES)))
    for place, address in enumerate(spaced(b, out, row_bytes, num_rows)):
        form.put(b.load(held[2 * place]), b.load(held[2 * place + 1]), address)
    return context.get_dummy_value()


_weigh, _weigh_few = map(_tile_of, (_MANY, _FEW))


@strict
def weigh_values(weights: Any, values: Any, kept: Any, num_first: Any, num_keys: Any, num_rows: Any, out: Any) -> Any:
    """out = weights times the values that are `kept`, key by key: where a weight is 0, nothing changes.

    weights (blocks, keys, lanes) float32; values (rows, dimensions), float32 or bfloat16's bits, dimensions in whole
    _COLUMNS; out (rows in whole blocks, dimensions) float32. `kept` names `num_keys` rows, one at least, the
    `num_first` first of which are neighbours.
    """
    lanes = weights.shape[2]
    for begin in range(0, num_rows, _MANY):
        for column in range(0, values.shape[1], _COLUMNS):
            if num_rows - begin <= _FEW:
                _weigh_few(weights, begin // lanes, begin % lanes, values, column, kept, num_first, num_keys, out)
            else:
                _weigh(weights, begin // lanes, begin % lanes, values, column, kept, num_first, num_keys, out)


def put_head(head: Any, total: Any, row: int, begin: int, out: Any) -> None:
    """head / total among a row's numbers, from number `begin` on. Only within kernels."""
    raise NotImplementedError


@overload(put_head)
def _put_head(head, total, row, begin, out):  # type: ignore[no-untyped-def]  # noqa: ARG001
    def into_lanes(head, total, row, begin, out):  # type: ignore[no-untyped-def]
        here, lane = out[row // LANES], row % LANES
        for d in range(len(head)):  # by itself, a loop of vectors
            head[d] /= total
        for d in range(len(head)):
            here[begin + d, lane] = head[d]

    def into_floats(head, total, row, begin, out):  # type: ignore[no-untyped-def]
        for d in range(len(head)):
            out[row, begin + d] = head[d] / total

    def into_bits(head, total, row, begin, out):  # type: ignore[no-untyped-def]
        for d in range(len(head)):
            out[row, begin + d] = rounded(head[d] / total)

    if out.ndim == 3:
        return into_lanes
    return into_floats if isinstance(out.dtype, numba.types.Float) else into_bits
