"""Packed weights written out: the CPU's bits, and how fast, by format; part of `loadtest.gpu`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bough.model.checkpoint.checkpoint import TensorPlace
from bough.model.checkpoint.tensor_source import FreshMemory, ReusedMemory, Source
from bough.model.quant.awq import Awq
from bough.model.quant.bough_format import Packed
from bough.model.quant.gptq import Gptq
from bough.model.quant.quantize import GROUP_SIZES
from loadtest.gpu.parts import milliseconds

GROUP = 128  # as most checkpoints of others have it
LAYER_WEIGHTS = 855_638_016  # of a layer of a 70B
KINDS = {"uint8": "U8", "int8": "I8", "int32": "I32", "float16": "F16"}
DTYPES = (torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Random bytes in a format."""

    name: str
    source: Source
    raw: Sequence[torch.Tensor]  # on the host

    @property
    def packed_bytes(self) -> int:
        """That are read."""
        return sum(part.nbytes for part in self.raw)


def packed_matrices(outputs: int, inputs: int) -> list[PackedMatrix]:
    """One of every format that a GPU has a kernel for."""
    rng = np.random.default_rng(0)

    def words(*shape: int) -> np.ndarray[Any, Any]:
        return rng.integers(-(1 << 31), 1 << 31, shape).astype(np.int32)

    def scales(*shape: int) -> np.ndarray[Any, Any]:
        return rng.uniform(0.001, 0.01, shape).astype(np.float16)

    per_group = scales(inputs // GROUP, outputs)
    gptq = words(inputs // 8, outputs), words(inputs // GROUP, outputs // 8), per_group
    order = rng.permutation(np.arange(inputs) // GROUP).astype(np.int32)
    awq = words(inputs, outputs // 8), words(inputs // GROUP, outputs // 8), per_group
    bytes_ = rng.integers(0, 256, (outputs, inputs), np.uint8)
    return [
        _made(
            "bough 4 bits",
            lambda w, s: Packed(w, s, 4),
            bytes_[:, ::2].copy(),
            scales(2, outputs, inputs // GROUP_SIZES[4]),
        ),
        _made(
            "bough 8 bits",
            lambda w, s: Packed(w, s, 8),
            bytes_.view(np.int8),
            scales(1, outputs, inputs // GROUP_SIZES[8]),
        ),
        _made("gptq", lambda w, z, s: Gptq(w, z, s, None, 4, 1), *gptq),
        _made("gptq by g_idx", lambda w, z, s, g: Gptq(w, z, s, g, 4, 1), *gptq, order),
        _made("awq", Awq, *awq),
    ]


def _made(name: str, make: Callable[..., Source], *arrays: np.ndarray[Any, Any]) -> PackedMatrix:
    places = [
        TensorPlace(f"{number}", Path(), 0, array.nbytes, KINDS[str(array.dtype)], array.shape)
        for number, array in enumerate(arrays)
    ]
    return PackedMatrix(name, make(*places), [torch.from_numpy(array).view(torch.uint8).flatten() for array in arrays])


def unpacking(device: torch.device, compared: tuple[int, int], timed: tuple[int, int]) -> list[dict[str, Any]]:
    """Bits of matrices `compared` (outputs, inputs), and the time of `timed` ones, which should fit no cache."""
    small, large = packed_matrices(*compared), packed_matrices(*timed)
    return [_row(device, *pair, dtype) for dtype in DTYPES for pair in zip(small, large, strict=True)]


def _row(device: torch.device, small: PackedMatrix, large: PackedMatrix, dtype: torch.dtype) -> dict[str, Any]:
    wanted = small.source.value(small.raw, dtype, FreshMemory(CPU))
    found = small.source.value([part.to(device) for part in small.raw], dtype, FreshMemory(device)).cpu()
    is_equal = torch.equal(found.contiguous().view(torch.int16), wanted.contiguous().view(torch.int16))
    raw = [part.to(device) for part in large.raw]
    memory = ReusedMemory(torch.empty(large.source.scratch_bytes(dtype), dtype=torch.uint8, device=device))

    def write_out() -> None:
        memory.begin()
        large.source.value(raw, dtype, memory)

    ms = milliseconds(write_out, device)
    weights = int(np.prod(large.source.shape))
    return {
        "format": large.name,
        "dtype": str(dtype).removeprefix("torch."),
        "is_equal": is_equal,
        "ms": ms,
        "gb_s": round((large.packed_bytes + 2 * weights) / ms / 1e6, 1) if ms else None,
        "ms_a_70b_layer": round(ms * LAYER_WEIGHTS / weights, 2),
    }
