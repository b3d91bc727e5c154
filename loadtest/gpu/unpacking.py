"""Compares unpacking on the GPU with the CPU's bits, and measures it by format; part of `loadtest.gpu`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bough.model.checkpoint.tensor_source import FreshMemory, ReusedMemory
from bough.model.quant.format import Dequantized
from bough.model.quant.formats import SAMPLES
from loadtest.gpu.parts import device_milliseconds

LAYER_WEIGHTS = 855_638_016  # weights in a layer of a 70B
DTYPES = (torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


def unpacking(device: torch.device, compared: tuple[int, int], timed: tuple[int, int]) -> list[dict[str, Any]]:
    """Compare the bits of matrices `compared` (outputs, inputs), and time those of `timed`, which exceed caches."""
    return [
        _row(name, device, make(*compared), make(*timed), dtype) for name, make in SAMPLES.items() for dtype in DTYPES
    ]


def _row(name: str, device: torch.device, small: Dequantized, large: Dequantized, dtype: torch.dtype) -> dict[str, Any]:
    raw = small.random(np.random.default_rng(0))
    wanted = small.value(raw, dtype, FreshMemory(CPU))
    found = small.value([part.to(device) for part in raw], dtype, FreshMemory(device)).cpu()
    is_equal = torch.equal(found.contiguous().view(torch.int16), wanted.contiguous().view(torch.int16))
    raw = [part.to(device) for part in large.random(np.random.default_rng(0))]
    memory = ReusedMemory(torch.empty(large.scratch_bytes(dtype), dtype=torch.uint8, device=device))

    def write_out() -> None:
        memory.begin()
        large.value(raw, dtype, memory)

    ms = device_milliseconds(write_out, device)
    weights, packed_bytes = int(np.prod(large.shape)), sum(place.num_bytes for place in large.places)
    return {
        "format": name,
        "dtype": str(dtype).removeprefix("torch."),
        "is_equal": is_equal,
        "ms": ms,
        "gb_s": round((packed_bytes + 2 * weights) / ms / 1e6, 1) if ms else None,
        "ms_a_70b_layer": round(ms * LAYER_WEIGHTS / weights, 2),
    }
