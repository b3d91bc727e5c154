"""Work that threads take piece by piece, so that one which the system has put aside is not waited for.

A loop divided evenly lasts as long as the thread that was interrupted most; the reads of a checkpoint interrupt some
thread hundreds of times in a sweep. Each thread has a share of its own, whose pieces it takes one after another, so
that what it reads ahead is what it wants next; whoever has finished helps others. Loops follow one another without
threads being sent away and called together again: a loop is over when its pieces are done, whoever did them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bough.model.cpu.atomics import APART, add_one, seen, wait_a_moment
from bough.model.cpu.jit import strict_inner


def counters(num_threads: int, num_loops: int = 1) -> NDArray[np.int64]:
    """(num_loops, (num_threads + 1) * APART): pieces that are taken of each thread's share, and those that are done.

    One row for each loop.
    """
    return np.zeros((num_loops, (num_threads + 1) * APART), np.int64)


@strict_inner
def as_thread(number: Any) -> Any:
    """What a parallel loop counts, as a number with a sign: what it calls would otherwise be compiled for both."""
    return np.int64(number)


@strict_inner
def take(taken: Any, thread: Any, num_threads: Any, num_pieces: Any) -> Any:
    """A piece that nobody has taken yet, of the thread's own share or else of another's; num_pieces for none."""
    for step in range(num_threads):
        owner = (thread + step) % num_threads
        begin, end = owner * num_pieces // num_threads, (owner + 1) * num_pieces // num_threads
        if begin < end:
            piece = begin + add_one(taken[owner * APART :])
            if piece < end:
                return piece
    return num_pieces


@strict_inner
def take_next(taken: Any, thread: Any, num_threads: Any, num_pieces: Any) -> Any:
    """Another piece, when the one that was taken is done."""
    add_one(taken[num_threads * APART :])
    return take(taken, thread, num_threads, num_pieces)


@strict_inner
def wait_for_all(taken: Any, num_threads: Any, num_pieces: Any) -> Any:
    """Returns when all pieces of a loop are done, by whomever."""
    done, spins = taken[num_threads * APART :], 0
    while seen(done) < num_pieces:
        spins = wait_a_moment(spins)
