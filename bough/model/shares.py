"""Work that threads take piece by piece, so that one which the system has put aside is not waited for.

A loop divided evenly lasts as long as the thread that was interrupted most; the reads of a checkpoint interrupt some
thread hundreds of times in a sweep. Each thread has a share of its own, whose pieces it takes one after another, so
that what it reads ahead is what it wants next; whoever has finished helps others. Loops follow one another without
threads being sent away and called together again: a loop is over when its pieces are done, whoever did them.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from bough.model.vectors import I32, I64, call, has_feature

_APART = 8  # counters of two threads do not share a line of memory
_SPINS = 2000  # looks at what others have done, some tens of microseconds, before the system may run something else


def counters(num_threads: int, num_loops: int = 1) -> NDArray[np.int64]:
    """(num_loops, (num_threads + 1) * 8): of pieces that are taken of each thread's share, and of those that are done.

    One row for each loop.
    """
    return np.zeros((num_loops, (num_threads + 1) * _APART), np.int64)


def _counter(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
    return context.make_array(signature.args[0])(context, builder, values[0]).data


def _add_one(_context, counter):  # type: ignore[no-untyped-def]
    """What it was before. Who sees it raised sees what was written before."""

    def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", _counter(context, builder, signature, values), ir.Constant(I64, 1), "release")

    return numba.types.int64(counter), codegen


def _read(_context, counter):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
        return builder.load_atomic(_counter(context, builder, signature, values), "acquire", 8)

    return numba.types.int64(counter), codegen


def _wait_a_moment(_context):  # type: ignore[no-untyped-def]
    def codegen(context, builder, _signature, _values):  # type: ignore[no-untyped-def]
        if has_feature("sse2"):
            call(builder, "llvm.x86.sse2.pause", ir.FunctionType(ir.VoidType(), []), [])
        return context.get_dummy_value()

    return numba.types.void(), codegen


def _let_others_run(_context):  # type: ignore[no-untyped-def]
    def codegen(context, builder, _signature, _values):  # type: ignore[no-untyped-def]
        builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield"), [])
        return context.get_dummy_value()

    return numba.types.void(), codegen


_count: Any = intrinsic(_add_one)
_seen: Any = intrinsic(_read)
_pause: Any = intrinsic(_wait_a_moment)
_yield: Any = intrinsic(_let_others_run)
_compiled = numba.njit(fastmath=False, cache=True, error_model="numpy", nogil=True)


@_compiled
def as_thread(number):  # type: ignore[no-untyped-def]
    """What a parallel loop counts, as a number with a sign: what it calls would otherwise be compiled for both."""
    return np.int64(number)


@_compiled
def take(taken, thread, num_threads, num_pieces):  # type: ignore[no-untyped-def]
    """A piece that nobody has taken yet, of the thread's own share or else of another's; num_pieces for none."""
    for step in range(num_threads):
        owner = (thread + step) % num_threads
        begin, end = owner * num_pieces // num_threads, (owner + 1) * num_pieces // num_threads
        if begin < end:
            piece = begin + _count(taken[owner * _APART :])
            if piece < end:
                return piece
    return num_pieces


@_compiled
def take_next(taken, thread, num_threads, num_pieces):  # type: ignore[no-untyped-def]
    """Another piece, when the one that was taken is done."""
    _count(taken[num_threads * _APART :])
    return take(taken, thread, num_threads, num_pieces)


@_compiled
def wait_for_all(taken, num_threads, num_pieces):  # type: ignore[no-untyped-def]
    """Returns when all pieces of a loop are done, by whomever."""
    done, spins = taken[num_threads * _APART :], 0
    while _seen(done) < num_pieces:
        _pause()
        spins += 1
        if spins > _SPINS:
            _yield()
