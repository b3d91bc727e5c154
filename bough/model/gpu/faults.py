"""What a GPU's errors mean to a worker: memory that ran out comes back, and a context that is lost does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from bough.errors import AcceleratorFull, AcceleratorLost
from bough.runtime.fatal_exit import exit_soon

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, the one error of CUDA's own after which all goes on


@contextmanager
def named_faults(device: torch.device, on_lost: Callable[[Exception], None] | None = None) -> Iterator[None]:
    """Raises what torch says of an accelerator as an error of ours.

    CUDA answers every call after an illegal access, a failed assertion or a fallen device with the same error, for as
    long as the process lives. `on_lost` therefore ends it, by default; whoever supervises it starts another.

    Raises:
        AcceleratorFull: there was no memory; less work at once may find some.
        AcceleratorLost: nothing will work any more.
    """
    try:
        yield
    except torch.OutOfMemoryError as exc:
        raise _full(device, exc) from exc
    except torch.AcceleratorError as exc:
        if getattr(exc, "error_code", None) == OUT_OF_MEMORY:
            raise _full(device, exc) from exc
        lost = AcceleratorLost(f"--device: {device} is lost to this process: {_first_line(exc)}")
        (on_lost or exit_soon)(lost)
        raise lost from exc


def _full(device: torch.device, exc: Exception) -> AcceleratorFull:
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return AcceleratorFull(f"--device: {device} has no memory left: {_first_line(exc)}")


def _first_line(exc: Exception) -> str:
    """CUDA's errors bring advice for whoever debugs kernels."""
    return str(exc).split("\n", 1)[0]
