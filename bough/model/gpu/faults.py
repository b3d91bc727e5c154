"""What a GPU's errors mean to a worker: memory that ran out comes back, and a context that is lost does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from bough.errors import AcceleratorFull, AcceleratorLost
from bough.runtime.fatal_exit import exit_soon

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, the one error of CUDA's own after which all goes on
LIBRARIES_FULL = "CUBLAS_STATUS_ALLOC_FAILED", "Triton Error [CUDA]: out of memory"  # as plain RuntimeErrors say it


@contextmanager
def named_faults(
    device: torch.device, others: Sequence[torch.device] = (), on_lost: Callable[[Exception], None] | None = None
) -> Iterator[None]:
    """Raises what torch and its libraries say of accelerators, `device` or `others`, as an error of ours.

    CUDA answers every call after an illegal access, a failed assertion or a fallen device with the same error, for as
    long as the process lives. `on_lost` therefore ends it, by default; whoever supervises it starts another. Triton and
    cuBLAS raise RuntimeErrors, as much else does: the devices are asked then.

    Raises:
        AcceleratorFull: there was no memory; less work at once may find some.
        AcceleratorLost: nothing will work any more.
    """
    try:
        yield
    except RuntimeError as exc:
        if device.type == "cpu":
            raise
        if _is_full(exc):
            raise _full(device, exc) from exc
        lost = _loss(device, exc) if isinstance(exc, torch.AcceleratorError) else _asked((device, *others))
        if lost is None:
            raise
        (on_lost or exit_soon)(lost)
        raise lost from exc


def _is_full(exc: RuntimeError) -> bool:
    is_memory = isinstance(exc, torch.OutOfMemoryError) or getattr(exc, "error_code", None) == OUT_OF_MEMORY
    return is_memory or any(words in str(exc) for words in LIBRARIES_FULL)


def _asked(devices: Iterable[torch.device]) -> AcceleratorLost | None:
    """The loss of the first device that cannot be waited for any more; None if all of them work."""
    for device in devices:
        try:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except RuntimeError as exc:
            return _loss(device, exc)
    return None


def _loss(device: torch.device, exc: Exception) -> AcceleratorLost:
    return AcceleratorLost(f"--device: {device} is lost to this process: {_first_line(exc)}")


def _full(device: torch.device, exc: Exception) -> AcceleratorFull:
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return AcceleratorFull(f"--device: {device} has no memory left: {_first_line(exc)}")


def _first_line(exc: Exception) -> str:
    """CUDA's errors bring advice for whoever debugs kernels."""
    return str(exc).split("\n", 1)[0]
