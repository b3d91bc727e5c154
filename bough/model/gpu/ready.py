"""What is settled on a GPU before anything is computed there, and what is refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bough.errors import ConfigError
from bough.model.gpu.kernels import of_gpus


def make_ready(device: torch.device) -> None:
    """Has products summed in float32 throughout, and kernels tried; on the CPU there is nothing to do.

    Raises:
        ConfigError: Triton is there and cannot compile.
    """
    if device.type == "cpu":
        return
    settle_sums()
    require_kernels(device, lambda: _try_one(device))
    _take_library_memory(device)


def settle_sums() -> None:
    """Takes back torch's leave to round what is summed on the way, which is for speed and depends on the shape."""
    products = torch.backends.cuda.matmul
    products.allow_tf32 = False
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False


def _take_library_memory(device: torch.device) -> None:
    """Has cuBLAS take its workspace: what is free afterwards is what there is."""
    with torch.cuda.device(device):
        for dtype in (torch.bfloat16, torch.float16):
            square = torch.zeros((256, 256), dtype=dtype, device=device)
            torch.nn.functional.linear(square, square)
        torch.cuda.synchronize(device)


def require_kernels(device: torch.device, try_one: Callable[[], None]) -> None:
    """Whether `try_one`, which has a kernel compiled, comes back, where Triton is there at all.

    Triton has a C compiler build what launches a kernel, at its first launch: without one a worker would die then.
    """
    if of_gpus() is None:
        return
    try:
        try_one()
    except Exception as exc:
        raise ConfigError(
            f"--device: on {device} Triton must compile kernels, got {type(exc).__name__}: {exc}; it takes a C "
            "compiler (gcc, or what CC names) and Python's headers (Python.h, such as in python3-dev)"
        ) from exc


def _try_one(device: torch.device) -> None:
    """A group of 4 bits."""
    kernels = of_gpus()
    assert kernels is not None
    with torch.cuda.device(device):
        packed = torch.full((1, 16), 0x21, dtype=torch.uint8, device=device)
        out = torch.empty((1, 32), dtype=torch.float16, device=device)
        kernels.write_own(packed, torch.ones((2, 1, 1), dtype=torch.float16, device=device), 4, out)
        found = sorted({float(number) for number in out.cpu().flatten()})
    if found != [2.0, 3.0]:
        raise RuntimeError(f"1 and 2 times 1, and 1 more, came to {found}")
