"""How many threads compute, in every library that has some."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numba
import torch

from bough.model.cpu.jit import compiler_setting

Result = TypeVar("Result")
SWITCH_SECONDS = 0.0002
WHOLE = 2  # threads among which torch shares rows without cutting one, whatever their number and size


def compute_with(num_threads: int) -> None:
    """To be called on the thread that computes: numba's setting is each thread's own.

    One thread of a process computes, and no other: each thread that calls into OpenMP, as this does, gets a team of its
    own, and with more threads than processors OpenMP's waiting ones go to sleep instead of spinning, which made sweeps
    of many small products take up to twice their time. What else computes does so `on_a_passing_thread`.
    """
    torch.set_num_threads(num_threads)
    available: int = compiler_setting("NUMBA_NUM_THREADS")
    numba.set_num_threads(min(num_threads, available))


def on_a_passing_thread(function: Callable[[], Result]) -> Result:
    """What a function returns or raises; if it computes, its team of OpenMP's threads ends with it."""
    with ThreadPoolExecutor(1, thread_name_prefix="passing") as passing:
        return passing.submit(function).result()


def hand_over_soon() -> None:
    """For a process in which one thread computes while others have a little to do now and then: calls, copies.

    Each waits for Python's interpreter until the one that computes has been asked to let go of it: by default for 5 ms,
    in which nothing is sent, received or copied.
    """
    sys.setswitchinterval(SWITCH_SECONDS)


def compute_reproducibly_with(num_threads: int) -> None:
    """The same, where a number's bits must not depend on its place among others (bough.model.running.batch_invariance).

    torch divides numbers evenly among its threads: three would cut a row, and the numbers at a cut, which do not fill a
    vector, are rounded otherwise. So it has two at most, but for products (`all_threads`).
    """
    compute_with(num_threads)
    torch.set_num_threads(min(num_threads, WHOLE))


@contextmanager
def all_threads() -> Iterator[None]:
    """As many for torch as numba has, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(numba.get_num_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)
