"""Work that threads take piece by piece, so that one which the system has put aside is not waited for.

A loop divided evenly lasts as long as the thread that was interrupted most; the reads of a checkpoint interrupt some
thread hundreds of times in a sweep. Each thread has a share of its own, whose pieces it takes one after another, so
that what it reads ahead is what it wants next; whoever has finished helps others.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic
from numpy.typing import NDArray

from bough.model.vectors import I64

_APART = 8  # counters of two threads do not share a line of memory


def counters(num_threads: int, num_loops: int = 1) -> NDArray[np.int64]:
    """(num_loops, num_threads * 8): of the pieces that are taken of each thread's share; one row for each loop."""
    return np.zeros((num_loops, num_threads * _APART), np.int64)


def _add_one(_context, counter):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
        taken = context.make_array(signature.args[0])(context, builder, values[0]).data
        return builder.atomic_rmw("add", taken, ir.Constant(I64, 1), "monotonic")

    return numba.types.int64(counter), codegen


_count: Any = intrinsic(_add_one)


@numba.njit(fastmath=False, cache=True, error_model="numpy", nogil=True)
def take(taken, thread, num_threads, num_pieces):  # type: ignore[no-untyped-def]
    """A piece that nobody has taken yet, of the thread's own share or else of another's; num_pieces for none."""
    for step in range(num_threads):
        owner = (thread + step) % num_threads
        begin, end = owner * num_pieces // num_threads, (owner + 1) * num_pieces // num_threads
        piece = begin + _count(taken[owner * _APART :])
        if piece < end:
            return piece
    return num_pieces
