"""Compares unpacking on the GPU with the CPU's bits, and measures it by format; part of `loadtest.gpu`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bough.model.checkpoint.tensor_source import FreshMemory, ReusedMemory
from bough.model.sizes.samples import PackedFormat, PackedSample
from loadtest.gpu.parts import device_milliseconds

GROUP = 128  # the group size of most public checkpoints
LAYER_WEIGHTS = 855_638_016  # weights in a layer of a 70B
DTYPES = (torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


FORMATS = (
    PackedFormat("gptq", 4, GROUP),
    PackedFormat("gptq", 4, GROUP, is_ordered=False),
    PackedFormat("awq", 4, GROUP),
    PackedFormat("compressed-tensors", 4, GROUP),
    PackedFormat("int8", 8, -1),
    PackedFormat("fp8", 8, GROUP),
    PackedFormat("mxfp4", 4, 32),
    PackedFormat("nvfp4", 4, 16),
    PackedFormat("Q4_K", 4, 256),
    PackedFormat("Q6_K", 6, 256),
    PackedFormat("Q8_0", 8, 32),
)


def unpacking(device: torch.device, compared: tuple[int, int], timed: tuple[int, int]) -> list[dict[str, Any]]:
    """Compare the bits of matrices `compared` (outputs, inputs), and time those of `timed`, which exceed caches."""
    return [
        _row(str(packed), device, packed.sample(*compared), packed.sample(*timed), dtype)
        for packed in FORMATS
        for dtype in DTYPES
    ]


def _row(
    name: str, device: torch.device, small: PackedSample, large: PackedSample, dtype: torch.dtype
) -> dict[str, Any]:
    wanted = small.source.value(small.raw, dtype, FreshMemory(CPU))
    found = small.source.value([part.to(device) for part in small.raw], dtype, FreshMemory(device)).cpu()
    is_equal = torch.equal(found.contiguous().view(torch.int16), wanted.contiguous().view(torch.int16))
    raw = [part.to(device) for part in large.raw]
    memory = ReusedMemory(torch.empty(large.source.scratch_bytes(dtype), dtype=torch.uint8, device=device))

    def write_out() -> None:
        memory.begin()
        large.source.value(raw, dtype, memory)

    ms = device_milliseconds(write_out, device)
    weights = int(np.prod(large.source.shape))
    return {
        "format": name,
        "dtype": str(dtype).removeprefix("torch."),
        "is_equal": is_equal,
        "ms": ms,
        "gb_s": round((large.packed_bytes + 2 * weights) / ms / 1e6, 1) if ms else None,
        "ms_a_70b_layer": round(ms * LAYER_WEIGHTS / weights, 2),
    }
