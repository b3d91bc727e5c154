"""Products with a whole matrix, by all threads, of many rows or few."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
from numba.extending import overload

from bough.model.cpu import amx, amx_tiles, gemm_few_outputs, gemm_few_rows
from bough.model.cpu.gemm import GROUP, compiled, multiply_groups, parallel
from bough.model.cpu.gemm_int8 import multiply_int8
from bough.model.cpu.llvm_vectors import LANES, has_feature, multiplies_pairs
from bough.model.cpu.operands import are_codes, num_outputs_of
from bough.model.cpu.work_stealing import as_thread, take, take_next, wait_for_all

PIECES = 8  # of a matrix for each thread, which they take as they come to them
HAS_TILES = amx.has_tiles() and amx_tiles.are_right()
# Of few rows in 16 bits: how targets multiply them, where that gives the bits of many, and drafts, which need no bits.
_ARE_FEW_ALIKE = not (HAS_TILES or multiplies_pairs())
_few_alike: Any = gemm_few_outputs if _ARE_FEW_ALIKE else gemm_few_rows
_few: Any = gemm_few_rows if has_feature("avx512f") else gemm_few_outputs
_multiply_many = amx_tiles.multiply_groups_by_tiles if HAS_TILES else multiply_groups


class Alike(NamedTuple):
    """A number of rows whose products must be bit for bit what they are among many."""

    num: int

    @classmethod
    def of(cls, num_rows: int, num_blocks: int) -> Alike:
        """Of rows in blocks: as many as are computed."""
        return cls(num_rows if _ARE_FEW_ALIKE else num_blocks * LANES)


def multiply(rows: Any, few: Any, num_rows: Any, matrix: Any, begin: int, end: int, bias: Any, out: Any) -> None:
    """`num_rows` rows, or `Alike`, times groups [begin, end) of a matrix, GROUP outputs in each. Only within kernels.

    Either `out` is (rows in whole blocks, outputs), float32 or, in 16 bits, bfloat16's bits, and takes sums plus `bias`
    (outputs,); or (blocks, outputs, LANES) float32, to which sums are added, with None for `bias`. `few` is what
    `form_of` makes of the rows.
    """
    raise NotImplementedError


@overload(multiply)
def _multiply(rows, few, num_rows, matrix, begin, end, bias, out):  # type: ignore[no-untyped-def]  # noqa: ARG001
    multiply_few = (gemm_few_outputs if few.dtype == numba.types.float32 else gemm_few_rows).multiply_few

    def by_number(rows, few, num_rows, matrix, begin, end, bias, out):  # type: ignore[no-untyped-def]  # noqa: ARG001
        if len(few):
            multiply_few(few, matrix, begin, end, bias, out)
        else:
            _multiply_many(rows, matrix, begin, end, bias, out)

    def in_8_bits(rows, few, num_rows, matrix, begin, end, bias, out):  # type: ignore[no-untyped-def]  # noqa: ARG001
        multiply_int8(rows, num_rows, matrix, begin, end, bias, out)

    def in_8_bits_by_tiles(rows, few, num_rows, matrix, begin, end, bias, out):  # type: ignore[no-untyped-def]
        amx_tiles.multiply_int8_by_tiles(rows, few, num_rows, matrix, begin, end, bias, out)

    def in_32_bits(rows, few, num_rows, matrix, begin, end, bias, out):  # type: ignore[no-untyped-def]  # noqa: ARG001
        multiply_groups(rows, matrix, begin, end, bias, out)

    if are_codes(rows):
        return in_8_bits_by_tiles if HAS_TILES else in_8_bits
    return by_number if rows.dtype == numba.types.int32 else in_32_bits


def form_of(rows: Any, num_rows: Any) -> Any:
    """Rows in the form in which they are multiplied, where they are not as they stand: else of no length.

    Few rows in 16 bits, and many in 8 bits by registers of tiles. Only within kernels.
    """
    raise NotImplementedError


@overload(form_of)
def _form_of(rows, num_rows):  # type: ignore[no-untyped-def]
    if rows.dtype == numba.types.int32:
        few_of, few_alike_of = _few.few_of, _few_alike.few_of
        if isinstance(num_rows, numba.types.BaseTuple):
            return lambda rows, num_rows: few_alike_of(rows, num_rows.num)
        return lambda rows, num_rows: few_of(rows, num_rows)
    if HAS_TILES and are_codes(rows):
        return lambda rows, num_rows: amx_tiles.codes_by_row(rows, num_rows)
    return lambda rows, num_rows: rows[:0]  # noqa: ARG005


@compiled
def num_groups_of(matrix):  # type: ignore[no-untyped-def]
    """Groups of its rows."""
    return (num_outputs_of(matrix) + GROUP - 1) // GROUP


@compiled
def num_pieces_of(num_parts, num_threads):  # type: ignore[no-untyped-def]
    """In how many pieces threads take so many parts of a matrix."""
    return min(num_parts, PIECES * num_threads)


@compiled
def parts_of(piece, num_pieces, num_parts):  # type: ignore[no-untyped-def]
    """Those of a piece, [begin, end)."""
    return piece * num_parts // num_pieces, (piece + 1) * num_parts // num_pieces


@compiled
def share_product(taken, thread, num_threads, rows, num_rows, matrix, bias, out):  # type: ignore[no-untyped-def]
    """A thread's part of `project`."""
    few, num_groups = form_of(rows, num_rows), num_groups_of(matrix)
    num_pieces = num_pieces_of(num_groups, num_threads)
    piece = take(taken, thread, num_threads, num_pieces)
    while piece < num_pieces:
        begin, end = parts_of(piece, num_pieces, num_groups)
        multiply(rows, few, num_rows, matrix, begin, end, bias, out)
        piece = take_next(taken, thread, num_threads, num_pieces)
    wait_for_all(taken, num_threads, num_pieces)


@parallel
def project(taken, num_threads, rows, num_rows, matrix, bias, out):  # type: ignore[no-untyped-def]
    """All groups of a matrix by all threads; `taken` is a row of `bough.model.cpu.work_stealing.counters`.

    Few rows in 16 bits are computed otherwise: say `Alike` where that must not be seen.
    """
    for number in numba.prange(num_threads):
        thread = as_thread(number)
        share_product(taken, thread, num_threads, rows, num_rows, matrix, bias, out)
