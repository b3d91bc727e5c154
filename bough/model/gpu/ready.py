"""Settings and checks of a GPU before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bough.errors import ConfigError
from bough.model.gpu.faults import is_full, named_faults
from bough.model.gpu.kernels import of_gpus


def make_ready(device: torch.device) -> None:
    """Set matrix products to accumulate in float32, and try a kernel; does nothing on the CPU.

    Raises:
        ConfigError: Triton is not installed, or cannot compile.
        AcceleratorFull: others have taken the device's memory.
    """
    if device.type == "cpu":
        return
    settle_sums()
    with named_faults(device):
        require_kernels(device, lambda: _try_one(device))
        _take_library_memory(device)


def settle_sums() -> None:
    """Turn off reduced-precision accumulation, whose rounding depends on the shape."""
    products = torch.backends.cuda.matmul
    products.allow_tf32 = False
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False


def _take_library_memory(device: torch.device) -> None:
    """Make cuBLAS allocate its workspace, so that free memory can be measured afterwards."""
    with torch.cuda.device(device):
        for dtype in (torch.bfloat16, torch.float16):
            square = torch.zeros((256, 256), dtype=dtype, device=device)
            torch.nn.functional.linear(square, square)
        torch.cuda.synchronize(device)


def require_kernels(device: torch.device, try_one: Callable[[], None]) -> None:
    """Run `try_one`, which compiles a kernel. Raises ConfigError if Triton is missing or fails.

    Where a device has no memory left, its error is raised as it is.
    Triton needs a C compiler for a kernel's first launch; without one a worker would fail only then.
    """
    of_gpus()
    try:
        try_one()
    except Exception as exc:
        if is_full(exc):
            raise
        raise ConfigError(
            f"--device: on {device} Triton must compile kernels, got {type(exc).__name__}: {exc}; it takes a C "
            "compiler (gcc, or what CC names) and Python's headers (Python.h, such as in python3-dev)"
        ) from exc


def _try_one(device: torch.device) -> None:
    """Unpack one group of 4-bit weights."""
    with torch.cuda.device(device):
        words = torch.full((1, 16), 0xA9, dtype=torch.uint8, device=device).view(torch.int32)  # 9 and 10, of 0 to 15
        out = torch.empty((1, 32), dtype=torch.float16, device=device)
        of_gpus().write_along(
            words, torch.ones((1, 1), dtype=torch.float16, device=device), None, None, 4, (1, 32), out
        )
        found = sorted({float(number) for number in out.cpu().flatten()})
    if found != [1.0, 2.0]:
        raise RuntimeError(f"9 and 10 less 8, times 1, came to {found}")
