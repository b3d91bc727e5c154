"""Work stealing in parallel loops: a preempted thread does not delay the others.

An evenly divided loop lasts as long as its most interrupted thread, and reads of a checkpoint interrupt some thread
hundreds of times in a sweep. Each thread has its own share of pieces and takes them in order, which suits prefetching;
a thread that has finished helps others. Consecutive loops need no fork and join: a loop is over when all its pieces
are done, by any thread.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from bough.model.cpu.jit import strict_inner
from bough.model.cpu.llvm_vectors import I32, I64, call, has_feature

APART = 8  # distance between counters in int64: no two share a cache line
_SPINS = 2000  # reads of a counter, some tens of microseconds, before a waiting thread yields


def _counter(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
    return context.make_array(signature.args[0])(context, builder, values[0]).data


def _add_one(_context: Any, counter: Any) -> Any:
    """Atomically add 1 and return the old value; a thread that reads the new value sees all earlier writes."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", _counter(context, builder, signature, values), ir.Constant(I64, 1), "release")

    return numba.types.int64(counter), codegen


def _read(_context: Any, counter: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(_counter(context, builder, signature, values), "acquire", 8)

    return numba.types.int64(counter), codegen


def _pause(_context: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        if has_feature("sse2"):
            call(builder, "llvm.x86.sse2.pause", ir.FunctionType(ir.VoidType(), []), [])
        return context.get_dummy_value()

    return numba.types.void(), codegen


def _let_others_run(_context: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield"), [])
        return context.get_dummy_value()

    return numba.types.void(), codegen


add_one: Any = intrinsic(_add_one)  # to the first entry of an array
seen: Any = intrinsic(_read)  # atomic read of the first entry of an array
_pause_once: Any = intrinsic(_pause)
_yield: Any = intrinsic(_let_others_run)


@strict_inner
def wait_a_moment(spins: Any) -> Any:
    """Pause between two reads of a counter; `spins` is the number of pauses before. Returns spins + 1."""
    _pause_once()
    if spins > _SPINS:
        _yield()
    return spins + 1


def counters(num_threads: int, num_loops: int = 1) -> NDArray[np.int64]:
    """Counters (num_loops, (num_threads + 1) * APART) of zeros.

    A row has, for each thread, the number of taken pieces of its share, and last the number of pieces done.
    """
    return np.zeros((num_loops, (num_threads + 1) * APART), np.int64)


@strict_inner
def as_thread(number: Any) -> Any:
    """Convert a parallel loop's unsigned index to int64, to compile callees for one type only."""
    return np.int64(number)


@strict_inner
def shared(taken: Any, thread: Any, num_threads: Any, num_pieces: Any) -> Any:
    """Yield the pieces of a loop that a thread takes; ends when all pieces are done, by any thread.

    `taken` is a row of `counters`.
    """
    done = taken[num_threads * APART :]
    piece = _take(taken, thread, num_threads, num_pieces)
    while piece < num_pieces:
        yield piece
        add_one(done)
        piece = _take(taken, thread, num_threads, num_pieces)
    spins = 0
    while seen(done) < num_pieces:
        spins = wait_a_moment(spins)


@strict_inner
def _take(taken: Any, thread: Any, num_threads: Any, num_pieces: Any) -> Any:
    """Take a piece from the thread's own share, or else from another's; returns num_pieces if none is left."""
    for step in range(num_threads):
        owner = (thread + step) % num_threads
        begin, end = owner * num_pieces // num_threads, (owner + 1) * num_pieces // num_threads
        if begin < end:
            piece = begin + add_one(taken[owner * APART :])
            if piece < end:
                return piece
    return num_pieces
