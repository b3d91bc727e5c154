"""Number of computing threads in torch and numba."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numba
import torch

Result = TypeVar("Result")
SWITCH_SECONDS = 0.0002
WHOLE = 2  # most torch threads with which no row is split, for any shape


def compute_with(num_threads: int) -> None:
    """Set the number of threads; must be called on the thread that computes, as numba's setting is per thread.

    Only one thread of a process may compute: each thread that calls into OpenMP, as this function does, gets its own
    team, and with more threads than processors OpenMP's waiting threads sleep instead of spinning. Sweeps of
    many small products then take up to twice as long. Other computations go through `on_a_passing_thread`.
    """
    torch.set_num_threads(num_threads)
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]


def on_a_passing_thread(function: Callable[[], Result]) -> Result:
    """Run a function on a short-lived thread, with which its OpenMP team ends; returns or raises what it does."""
    with ThreadPoolExecutor(1, thread_name_prefix="passing") as passing:
        return passing.submit(function).result()


def hand_over_soon() -> None:
    """Shorten the GIL's switch interval, for processes with a computing thread and others for calls and copies.

    By default a waiting thread asks for the GIL after 5 ms, in which nothing is sent, received or copied.
    """
    sys.setswitchinterval(SWITCH_SECONDS)


def compute_reproducibly_with(num_threads: int) -> None:
    """Set the number of threads for batch-invariant bits; must be called on the thread that computes.

    torch divides numbers evenly among threads. Three threads would split a row, and the numbers at the split, which do
    not fill a vector, are rounded differently. So torch gets at most two threads, except for products (`all_threads`).
    """
    compute_with(num_threads)
    torch.set_num_threads(min(num_threads, WHOLE))


@contextmanager
def all_threads() -> Iterator[None]:
    """Give torch as many threads as numba within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(numba.get_num_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)
