"""Classification of GPU errors: out of memory, after which work goes on, and a lost context, after which none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from bough.errors import AcceleratorFull, AcceleratorLost
from bough.runtime.fatal_exit import exit_soon

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, the only CUDA error after which the context is still usable


@contextmanager
def named_faults(device: torch.device, on_lost: Callable[[Exception], None] | None = None) -> Iterator[None]:
    """Convert torch's accelerator errors within the block to bough's.

    After an illegal access, a failed assertion or a lost device, every further CUDA call of the process fails with the
    same error. `on_lost` therefore ends the process by default, and its supervisor starts another.

    Raises:
        AcceleratorFull: device memory ran out; smaller batches may still fit.
        AcceleratorLost: the process can no longer use the device.
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
    """The first line of an error; the others are advice on debugging kernels."""
    return str(exc).split("\n", 1)[0]
