"""How many threads compute, in every library that has some."""

from __future__ import annotations

import numba
import torch


def compute_with(num_threads: int) -> None:
    """To be called on the thread that computes: numba's setting is each thread's own.

    One thread of a process computes, and no other: each thread that calls into OpenMP gets a team of its own, and with
    more teams than processors OpenMP's waiting threads go to sleep instead of spinning, which made sweeps of many small
    products take twice their time.
    """
    torch.set_num_threads(num_threads)
    available: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    numba.set_num_threads(min(num_threads, available))
