"""Products of rows, many or few, with a whole matrix, shared by all threads."""

from __future__ import annotations

from typing import Any

import numba
from numba.extending import overload

from bough.model.cpu.gemm import GROUP, multiply_groups
from bough.model.cpu.gemm_few_outputs import few_of, multiply_few
from bough.model.cpu.gemm_int8 import multiply_int8
from bough.model.cpu.jit import strict_inner
from bough.model.cpu.llvm_vectors import multiplies_pairs
from bough.model.cpu.operands import are_codes, num_outputs_of
from bough.model.cpu.work_stealing import shared

PIECES = 8  # of a matrix per thread, for work stealing
_HAS_FEW = not multiplies_pairs()  # whether few rows have a product of their own, with the bits of many


def multiply(rows: Any, few: Any, num_rows: Any, matrix: Any, begin: int, end: int, bias: Any, out: Any) -> None:
    """Multiply `num_rows` rows with groups [begin, end) of a matrix, GROUP outputs each. For kernels only.

    Either `out` is (rows in whole blocks, outputs) of float32 or, for products in 16 bits, of bfloat16's bits and is
    set to sums plus `bias` (outputs,); or it is (blocks, outputs, LANES) float32, sums are added to it and `bias` is
    None. `few` is what `form_of` makes of the rows.
    """
    raise NotImplementedError


@overload(multiply)
def _multiply(rows, few, num_rows, matrix, begin, end, bias, out):  # type: (Any, Any, Any, Any, Any, Any, Any, Any) -> Any  # noqa: ARG001
    def few_or_many(rows, few, num_rows, matrix, begin, end, bias, out):  # type: (Any, Any, Any, Any, Any, Any, Any, Any) -> None  # noqa: ARG001
        if len(few):
            multiply_few(few, matrix, begin, end, bias, out)
        else:
            multiply_groups(rows, matrix, begin, end, bias, out)

    def in_8_bits(rows, few, num_rows, matrix, begin, end, bias, out):  # type: (Any, Any, Any, Any, Any, Any, Any, Any) -> None  # noqa: ARG001
        multiply_int8(rows, num_rows, matrix, begin, end, bias, out)

    def as_they_stand(rows, few, num_rows, matrix, begin, end, bias, out):  # type: (Any, Any, Any, Any, Any, Any, Any, Any) -> None  # noqa: ARG001
        multiply_groups(rows, matrix, begin, end, bias, out)

    if are_codes(rows):
        return in_8_bits
    return few_or_many if _HAS_FEW and rows.dtype == numba.types.int32 else as_they_stand


def form_of(rows: Any, num_rows: Any) -> Any:
    """Few rows in 16 bits in the form in which they are multiplied; of no length where rows are as they stand.

    Only within kernels.
    """
    raise NotImplementedError


@overload(form_of)
def _form_of(rows, num_rows):  # type: (Any, Any) -> Any  # noqa: ARG001
    if _HAS_FEW and rows.dtype == numba.types.int32:
        return lambda rows, num_rows: few_of(rows, num_rows)
    return lambda rows, num_rows: rows[:0]  # noqa: ARG005


@strict_inner
def num_groups_of(matrix: Any) -> Any:
    """Number of groups of a matrix's outputs."""
    return (num_outputs_of(matrix) + GROUP - 1) // GROUP


@strict_inner
def num_pieces_of(num_parts: Any, num_threads: Any) -> Any:
    """Number of pieces in which threads take `num_parts` parts of a matrix."""
    return min(num_parts, PIECES * num_threads)


@strict_inner
def parts_of(piece: Any, num_pieces: Any, num_parts: Any) -> Any:
    """The parts [begin, end) of a piece."""
    return piece * num_parts // num_pieces, (piece + 1) * num_parts // num_pieces


@strict_inner
def share_product(
    taken: Any, thread: Any, num_threads: Any, rows: Any, num_rows: Any, matrix: Any, bias: Any, out: Any
) -> Any:
    """A thread's share of a product; `taken` is a row of `bough.model.cpu.work_stealing.counters`."""
    few, num_groups = form_of(rows, num_rows), num_groups_of(matrix)
    num_pieces = num_pieces_of(num_groups, num_threads)
    for piece in shared(taken, thread, num_threads, num_pieces):
        begin, end = parts_of(piece, num_pieces, num_groups)
        multiply(rows, few, num_rows, matrix, begin, end, bias, out)
