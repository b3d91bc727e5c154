"""Work stealing in parallel loops, so that a preempted thread does not delay the others.

An evenly divided loop lasts as long as its most interrupted thread, and reads of a checkpoint interrupt some thread
hundreds of times in a sweep. Each thread has its own share of pieces and takes them in order, which suits prefetching;
a thread that has finished helps others. Consecutive loops need no fork and join: a loop is over when all its pieces
are done, whoever did them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bough.model.cpu.atomics import APART, add_one, seen, wait_a_moment
from bough.model.cpu.jit import strict_inner


def counters(num_threads: int, num_loops: int = 1) -> NDArray[np.int64]:
    """Counters (num_loops, (num_threads + 1) * APART) of zeros.

    A row has, for each thread, the number of taken pieces of its share, and last the number of pieces done.
    """
    return np.zeros((num_loops, (num_threads + 1) * APART), np.int64)


@strict_inner
def as_thread(number: Any) -> Any:
    """Convert a parallel loop's unsigned index to int64, so that callees are not compiled for both types."""
    return np.int64(number)


@strict_inner
def shared(taken: Any, thread: Any, num_threads: Any, num_pieces: Any) -> Any:
    """Yield the pieces of a loop that a thread takes; ends when all pieces are done, whoever did them.

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
