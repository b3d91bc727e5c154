"""Scores of attention, in compiled code: keys are lanes, turned once for all query rows that meet them.

Keys are read where they stand, in whatever order they are asked for. Each score is one sum, added up in the order of
its numbers whatever else is computed: the same bits beside any other keys and any other rows.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic, overload

from bough.model.cpu.float_bits import widened as widened_number
from bough.model.cpu.gemm import GROUP, LINE_BYTES, WORD_BYTES, by_lanes
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
    dot_pairs,
    multiplies_pairs,
    multiply_add,
    prefetch,
    shuffled,
    splat,
    store,
    turned,
    widened,
)

# Query rows whose sums registers hold beside what they are made of: enough of them that none waits for itself.
ROWS = min(8, NUM_VECTORS // 2)
WIDTH = 2 * LANES  # dimensions of a head that are turned together: whole lines, and as many numbers as are unrolled
KEYS_AHEAD = GROUP  # that are fetched: those of a head stand apart, where no processor looks for more of them
INDEX_BYTES = 8  # of a number of a row
_SHORT_WORDS, _VECTOR_BYTES = ir.VectorType(I32, SHORT), LANES * WORD_BYTES
_UNROLLED = 4  # numbers of a row at a time: a row has whole lines of them


def _turn_keys(_context: Any, keys: Any, kept: Any, first: Any, into: Any) -> Any:
    """Puts numbers of GROUP keys, rows `kept` from number `first` on, number by number of them into (numbers, LANES).

    Those of bfloat16 are widened, but where pairs are multiplied. Fetches what follows KEYS_AHEAD.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        b = builder
        arrays = (array_of(context, b, signature.args[place], values[place]) for place in (0, 1, 3))
        (begin, (key_bytes, number_bytes), (_, num_numbers)), (order, _, _), (out, _, _) = arrays
        length = b.mul(number_bytes, num_numbers)
        is_widened = signature.args[0].dtype == numba.types.uint16 and not multiplies_pairs()

        def key_of(index: Any) -> Any:
            place = at(b, order, b.mul(b.add(values[2], index), ir.Constant(I64, INDEX_BYTES)))
            return at(b, begin, b.mul(b.load(place, typ=I64, align=INDEX_BYTES), key_bytes))

        with cgutils.for_range(b, ir.Constant(I64, GROUP)) as key:
            ahead = key_of(b.add(key.index, ir.Constant(I64, KEYS_AHEAD)))
            line_bytes = ir.Constant(I64, LINE_BYTES)
            with cgutils.for_range_slice(b, ir.Constant(I64, 0), length, line_bytes) as (line, _):
                prefetch(b, at(b, ahead, line), FIRST_LEVEL)
        keys = [key_of(ir.Constant(I64, index)) for index in range(GROUP)]
        step = ir.Constant(I64, SHORT * WORD_BYTES)
        with cgutils.for_range_slice(b, ir.Constant(I64, 0), length, step) as (offset, _):
            pieces = [b.load(at(b, key, offset), typ=_SHORT_WORDS, align=2) for key in keys]
            words = zip(turned(b, pieces[:SHORT]), turned(b, pieces[SHORT:]), strict=True)
            vectors = [shuffled(b, low, high, range(LANES)) for low, high in words]
            if is_widened:
                vectors = [part for vector in vectors for part in widened(b, vector)]
            here = at(b, out, b.mul(offset, ir.Constant(I64, len(vectors) * _VECTOR_BYTES // (SHORT * WORD_BYTES))))
            for index, vector in enumerate(vectors):
                store(b, vector, at(b, here, ir.Constant(I64, index * _VECTOR_BYTES)))
        return context.get_dummy_value()

    return numba.types.void(keys, kept, first, into), codegen


def _score_rows(_context: Any, numbers: Any, asked: Any, row: Any, scores: Any, block: Any, key: Any, lane: Any) -> Any:
    """Puts products of ROWS rows of `asked` with GROUP keys into scores from [block, key, lane] on."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        b, (_, _, row, _, block, key, lane) = builder, values
        arrays = (array_of(context, b, signature.args[place], values[place]) for place in (0, 1, 3))
        (keys, _, (num_numbers, _)), (rows, (row_bytes, _), _), (out, (block_bytes, key_bytes, _), _) = arrays
        are_pairs = signature.args[1].dtype == numba.types.int32
        queries = [at(b, rows, b.mul(b.add(row, ir.Constant(I64, index)), row_bytes)) for index in range(ROWS)]
        held = [cgutils.alloca_once(b, FLOATS) for _ in queries]
        for sums in held:
            b.store(ir.Constant(FLOATS, [0.0] * LANES), sums)
        step = ir.Constant(I64, _UNROLLED)
        with cgutils.for_range_slice(b, ir.Constant(I64, 0), num_numbers, step) as (begin, _):
            line = at(b, keys, b.mul(begin, ir.Constant(I64, _VECTOR_BYTES)))
            for index in range(_UNROLLED):
                own = b.load(at(b, line, ir.Constant(I64, index * _VECTOR_BYTES)), typ=FLOATS, align=4)
                offset = b.mul(b.add(begin, ir.Constant(I64, index)), ir.Constant(I64, WORD_BYTES))
                for query, sums in zip(queries, held, strict=True):
                    number = splat(b, b.load(at(b, query, offset), typ=I32, align=4))
                    add = dot_pairs if are_pairs else multiply_add
                    words = b.bitcast(own, number.type) if are_pairs else own
                    b.store(add(b, b.load(sums), number, words), sums)
        together = by_lanes(b, [b.load(sums) for sums in held])
        first = at(b, at(b, out, b.mul(block, block_bytes)), b.mul(lane, ir.Constant(I64, WORD_BYTES)))
        for index in range(GROUP):
            part = shuffled(b, together, together, range(index * ROWS, (index + 1) * ROWS))
            store(b, part, at(b, first, b.mul(b.add(key, ir.Constant(I64, index)), key_bytes)))
        return context.get_dummy_value()

    return numba.types.void(numbers, asked, row, scores, block, key, lane), codegen


_turn: Any = intrinsic(_turn_keys)
_score: Any = intrinsic(_score_rows)


def rows_of(queries: Any, begin: int, end: int, kv_head: int, group: int, num_words: int, width: int) -> Any:
    """The query heads of a KV head as `put_scores` wants them: whole ROWS of `width` dimensions, zeros among them.

    queries (rows, words of all heads), of which each head has `num_words`. Only within kernels.
    """
    raise NotImplementedError


@overload(rows_of)
def _rows_of(queries, begin, end, kv_head, group, num_words, width):  # type: ignore[no-untyped-def]  # noqa: ARG001
    are_pairs = queries.dtype == numba.types.int32
    per_word = 2 if are_pairs and multiplies_pairs() else 1

    def as_words(queries, begin, end, kv_head, group, num_words, width):  # type: ignore[no-untyped-def]
        num_rows = (end - begin) * group
        asked = np.zeros((whole(num_rows, ROWS), width // per_word), queries.dtype)
        for i in range(num_rows):
            words = queries[begin + i // group, (kv_head * group + i % group) * num_words :]
            for word in range(num_words):
                asked[i, word] = words[word]
        return asked

    def as_floats(queries, begin, end, kv_head, group, num_words, width):  # type: ignore[no-untyped-def]
        num_rows = (end - begin) * group
        asked = np.zeros((whole(num_rows, ROWS), width), np.float32)
        for i in range(num_rows):
            words = queries[begin + i // group, (kv_head * group + i % group) * num_words :]
            for word in range(num_words):
                asked[i, 2 * word] = widened_number(words[word] & 0xFFFF)
                asked[i, 2 * word + 1] = widened_number((words[word] >> 16) & 0xFFFF)
        return asked

    return as_floats if are_pairs and not multiplies_pairs() else as_words


@strict_inner
def whole(number: Any, step: Any) -> Any:
    """The next multiple."""
    return (number + step - 1) // step * step


@strict
def put_scores(asked: Any, keys: Any, kept: Any, scores: Any) -> Any:
    """Puts the products of all rows of `asked` with the keys that are `kept` onto scores (blocks, keys, lanes).

    asked as `rows_of` has them; keys (rows, dimensions) of float32, or bfloat16's bits, in whole WIDTHs. `kept`
    names as many as there are scores for, in whole GROUPs, and KEYS_AHEAD beyond. Rows are lanes, of which each block
    has `scores.shape[2]`, in whole ROWS.
    """
    numbers, lanes = np.empty((asked.shape[1], LANES), asked.dtype), scores.shape[2]
    for first in range(0, scores.shape[1], GROUP):
        _turn(keys, kept, first, numbers)
        for row in range(0, len(asked), ROWS):
            _score(numbers, asked, row, scores, row // lanes, first, row % lanes)
