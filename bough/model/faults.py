"""Classification of GPU errors: out of memory, which a process survives, and a lost context, which ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from bough.errors import AcceleratorFull, AcceleratorLost
from bough.runtime.exit_status import exit_soon

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, the only CUDA error after which the context is still usable
LIBRARIES_FULL = "CUBLAS_STATUS_ALLOC_FAILED", "Triton Error [CUDA]: out of memory"  # in plain RuntimeErrors


@contextmanager
def named_faults(
    device: torch.device, others: Sequence[torch.device] = (), on_lost: Callable[[Exception], None] | None = None
) -> Iterator[None]:
    """Convert errors of accelerators, `device` or `others`, within the block to bough's.

    After an illegal access, a failed assertion or a lost device, every further CUDA call of the process fails with the
    same error. `on_lost` therefore ends the process by default, and its supervisor starts another. Triton and cuBLAS
    raise RuntimeErrors that may have other causes; after one of these the devices are queried.

    Raises:
        AcceleratorFull: device memory ran out; smaller batches may still fit.
        AcceleratorLost: the process can no longer use the device.
    """
    try:
        yield
    except RuntimeError as exc:
        if device.type == "cpu":
            raise
        if is_full(exc):
            raise _full(device, exc) from exc
        lost = _loss(device, exc) if isinstance(exc, torch.AcceleratorError) else _asked((device, *others))
        if lost is None:
            raise
        (on_lost or exit_soon)(lost)
        raise lost from exc


def is_full(exc: Exception) -> bool:
    """Whether an error of torch or of a library means that a device has no memory left."""
    is_memory = isinstance(exc, torch.OutOfMemoryError) or getattr(exc, "error_code", None) == OUT_OF_MEMORY
    return is_memory or any(words in str(exc) for words in LIBRARIES_FULL)


def _asked(devices: Iterable[torch.device]) -> AcceleratorLost | None:
    """The loss of the first device that cannot be synchronised any more; None if all of them work."""
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
    """The first line of an error; the others are advice on debugging kernels."""
    return str(exc).split("\n", 1)[0]
