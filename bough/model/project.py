"""Products with a whole matrix, by all threads, of many rows or few."""

from __future__ import annotations

from typing import Any

import numba
from numba.extending import overload

from bough.model.few_rows import multiply_few
from bough.model.shares import take
from bough.model.tiles import GROUP, compiled, multiply_groups, parallel

PIECES = 8  # of a matrix for each thread, which they take as they come to them


def multiply(rows: Any, matrix: Any, begin: int, end: int, bias: Any, out: Any) -> None:
    """`multiply_groups` of blocks, `multiply_few` of rows that are few. Only within kernels."""
    raise NotImplementedError


@overload(multiply)
def _multiply(rows, matrix, begin, end, bias, out):  # type: ignore[no-untyped-def]  # noqa: ARG001
    if rows.ndim == 3:
        return lambda rows, matrix, begin, end, bias, out: multiply_groups(rows, matrix, begin, end, bias, out)
    return lambda rows, matrix, begin, end, bias, out: multiply_few(rows, matrix, begin, end, bias, out)


@compiled
def num_groups_of(matrix):  # type: ignore[no-untyped-def]
    """Groups of its rows."""
    return (len(matrix) + GROUP - 1) // GROUP


@compiled
def next_groups(taken, thread, num_threads, num_groups):  # type: ignore[no-untyped-def]
    """The groups that a thread takes next, [begin, end); none when all are taken."""
    num_pieces = min(num_groups, PIECES * num_threads)
    piece = take(taken, thread, num_threads, num_pieces)
    return piece * num_groups // num_pieces, min(piece + 1, num_pieces) * num_groups // num_pieces


@parallel
def project(taken, num_threads, rows, matrix, bias, out):  # type: ignore[no-untyped-def]
    """All groups of a matrix by all threads; `taken` is a row of `bough.model.shares.counters`."""
    num_groups = num_groups_of(matrix)
    for thread in numba.prange(num_threads):
        begin, end = next_groups(taken, thread, num_threads, num_groups)
        while begin < end:
            multiply(rows, matrix, begin, end, bias, out)
            begin, end = next_groups(taken, thread, num_threads, num_groups)
