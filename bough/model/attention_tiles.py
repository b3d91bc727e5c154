"""What attention does with scores, in compiled code: weights of them, and weights times values. Rows are lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic, overload

from bough.model.numbers import rounded
from bough.model.tiles import LINE_BYTES, WORD_BYTES, compiled
from bough.model.vectors import (
    FLOATS,
    I32,
    I64,
    LANES,
    NUM_VECTORS,
    SECOND_LEVEL,
    WORDS,
    at,
    exp_below_zero,
    multiply_add,
    prefetch,
    shuffled,
    splat,
    store,
    widened,
)

WIDTH = 2 * LANES  # dimensions of a head that are computed together
ROWS = NUM_VECTORS // 4  # and rows, whose sums are half of what registers hold
FEW_ROWS = ROWS // 2  # of one token few heads share their keys
KEYS_AHEAD = 32  # whose values are fetched: they stand apart, where no processor looks for more of them


def _weights(_context, scores, peaks, totals):  # type: ignore[no-untyped-def]
    """scores (keys, LANES) become e to what they lie below `peaks` (LANES,), which is added to `totals`, key by key."""
    signature = numba.types.void(scores, peaks, totals)

    def codegen(context, builder, signature, given):  # type: ignore[no-untyped-def]
        scores, peaks, totals = (context.make_array(signature.args[i])(context, builder, given[i]) for i in range(3))
        (num_keys, _), (key_bytes, _) = (cgutils.unpack_tuple(builder, part) for part in (scores.shape, scores.strides))
        peak, total = (
            builder.load(at(builder, part.data, ir.Constant(I64, 0)), typ=FLOATS, align=4) for part in (peaks, totals)
        )
        held = cgutils.alloca_once_value(builder, total)
        with cgutils.for_range(builder, num_keys) as loop:
            place = at(builder, scores.data, builder.mul(loop.index, key_bytes))
            weight = exp_below_zero(builder, builder.fsub(builder.load(place, typ=FLOATS, align=4), peak))
            store(builder, weight, place)
            builder.store(builder.fadd(builder.load(held), weight), held)
        store(builder, builder.load(held), totals.data)
        return context.get_dummy_value()

    return signature, codegen


weigh_scores: Any = intrinsic(_weights)


class _Pair:
    """How the code has WIDTH numbers in two vectors: those of bfloat16, which come by twos, in even and odd places."""

    def __init__(self, builder: ir.IRBuilder, is_bf16: bool) -> None:
        self._builder, self._is_bf16 = builder, is_bf16

    def _load(self, address: Any, kind: Any) -> tuple[Any, Any]:
        addresses = (at(self._builder, address, ir.Constant(I64, offset)) for offset in (0, WORD_BYTES * LANES))
        first, second = (self._builder.load(one, typ=kind, align=2) for one in addresses)
        return first, second

    def values(self, address: Any) -> tuple[Any, Any]:
        """From memory, as float32."""
        if self._is_bf16:
            return widened(self._builder, self._builder.load(address, typ=WORDS, align=2))
        return self._load(address, FLOATS)

    def fetch(self, address: Any) -> None:
        """Brings what `values` will want nearer."""
        for line in range(0, WIDTH * (2 if self._is_bf16 else 4), LINE_BYTES):
            prefetch(self._builder, at(self._builder, address, ir.Constant(I64, line)), SECOND_LEVEL)

    def sums(self, address: Any) -> tuple[Any, Any]:
        """From float32 in memory."""
        first, second = self._load(address, FLOATS)
        if not self._is_bf16:
            return first, second
        even, odd = (shuffled(self._builder, first, second, range(begin, WIDTH, 2)) for begin in range(2))
        return even, odd

    def put(self, first: Any, second: Any, address: Any) -> None:
        """To where `sums` came from."""
        if self._is_bf16:
            by_turns = [place for pair in zip(range(LANES), range(LANES, WIDTH), strict=True) for place in pair]
            halves = by_turns[:LANES], by_turns[LANES:]
            first, second = (shuffled(self._builder, first, second, half) for half in halves)
        store(self._builder, first, address)
        store(self._builder, second, at(self._builder, address, ir.Constant(I64, WORD_BYTES * LANES)))


def _weigh_keys(
    b: ir.IRBuilder, form: _Pair, weight: Any, weight_bytes: Any, value: Any, value_bytes: Any, num_keys: Any, outs: Any
) -> None:
    """The loop over keys, one after another, with all sums in registers."""
    before = [sums for out in outs for sums in form.sums(out)]
    entry, body, done = b.block, b.append_basic_block("key"), b.append_basic_block("done")
    b.cbranch(b.icmp_signed("<", ir.Constant(I64, 0), num_keys), body, done)
    b.position_at_end(body)
    key, begins = b.phi(I64), [b.phi(FLOATS) for _ in before]
    form.fetch(at(b, value, b.mul(b.add(key, ir.Constant(I64, KEYS_AHEAD)), value_bytes)))
    pair, here = form.values(at(b, value, b.mul(key, value_bytes))), at(b, weight, b.mul(key, weight_bytes))
    after = []
    for row in range(len(outs)):
        number = splat(b, b.load(at(b, here, ir.Constant(I64, WORD_BYTES * row)), typ=I32, align=WORD_BYTES))
        after += [multiply_add(b, begins[2 * row + place], pair[place], number) for place in range(2)]
    following = b.add(key, ir.Constant(I64, 1))
    b.cbranch(b.icmp_signed("<", following, num_keys), body, done)
    key.add_incoming(ir.Constant(I64, 0), entry)
    key.add_incoming(following, body)
    b.position_at_end(done)
    results = [b.phi(FLOATS) for _ in before]
    for result, begin, first, last in zip(results, begins, before, after, strict=True):
        begin.add_incoming(first, entry)
        begin.add_incoming(last, body)
        result.add_incoming(first, entry)
        result.add_incoming(last, body)
    for row, out in enumerate(outs):
        form.put(results[2 * row], results[2 * row + 1], out)


def _tile_of(num_rows: int) -> Any:
    """A function that compiled code may call: as many rows by WIDTH, from a block's row and a column on."""

    def tile(_context, weights, block, row, key, values, column, out):  # type: ignore[no-untyped-def]
        return _tile(num_rows, numba.types.void(weights, block, row, key, values, column, out))

    return intrinsic(tile)


def _tile(num_rows: int, signature: Any) -> tuple[Any, Callable[..., Any]]:
    """Of one kind of arguments, as numba wants it: their types, and what puts the code there."""

    def codegen(context, builder, signature, given):  # type: ignore[no-untyped-def]
        def made(place: int) -> Any:
            return context.make_array(signature.args[place])(context, builder, given[place])

        def entry(place: int, *indices: ir.Value) -> tuple[ir.Value, ir.Value]:
            """Its address, and bytes from it to the next along the last axis but one."""
            steps, address = cgutils.unpack_tuple(builder, made(place).strides), made(place).data
            for index, step in zip(indices, steps, strict=True):
                address = at(builder, address, builder.mul(index, step))
            return address, steps[-2]

        _, block, row, key, _, column, _ = given
        first_row = builder.add(builder.mul(block, ir.Constant(I64, LANES)), row)
        out, row_bytes = entry(6, first_row, column)
        outs = [at(builder, out, builder.mul(row_bytes, ir.Constant(I64, index))) for index in range(num_rows)]
        weights, values = entry(0, block, key, row), entry(4, ir.Constant(I64, 0), column)
        num_keys = cgutils.unpack_tuple(builder, made(4).shape)[0]
        form = _Pair(builder, signature.args[4].dtype == numba.types.uint16)
        _weigh_keys(builder, form, *weights, *values, num_keys, outs)
        return context.get_dummy_value()

    return signature, codegen


_weigh, _weigh_few = map(_tile_of, (ROWS, FEW_ROWS))


@compiled
def weigh_values(weights, key, values, num_rows, out):  # type: ignore[no-untyped-def]
    """out += weights times values, key by key: where a weight is 0, nothing changes.

    weights (blocks, keys, LANES) float32, of which those from `key` on belong to the values (keys, dimensions), float32
    or bfloat16's bits; out (rows in whole blocks, dimensions) float32; dimensions in whole WIDTHs.
    """
    for begin in range(0, num_rows, ROWS):
        for column in range(0, values.shape[1], WIDTH):
            if num_rows - begin <= FEW_ROWS:
                _weigh_few(weights, begin // LANES, begin % LANES, key, values, column, out)
            else:
                _weigh(weights, begin // LANES, begin % LANES, key, values, column, out)


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
