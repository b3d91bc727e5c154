"""Random matrices in any quantized format, for measuring dequantization without a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bough.model.checkpoint.checkpoint import TensorPlace
from bough.model.checkpoint.gguf_file import BLOCKS
from bough.model.checkpoint.tensor_source import TensorSource, room_bytes
from bough.model.quant.awq import Awq
from bough.model.quant.ggml_blocks import Blocks
from bough.model.quant.gptq import Gptq
from bough.model.quant.scaled import EXPONENTS, FLOAT4, FLOAT8, INT8, WORDS, Scaled

KINDS = {"uint8": "U8", "int8": "I8", "int32": "I32", "float16": "F16", "float32": "F32"}
# Methods of `Scaled`, their numbers' dtypes, and whether scales have two levels.
BY_ROWS = {
    "compressed-tensors": (WORDS, False), "int8": (INT8, False), "fp8": (FLOAT8, False), "mxfp4": (FLOAT4, False),
    "nvfp4": (FLOAT4, True),
}  # fmt: skip
E4M3_NAN = 0x7F
WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How a matrix is stored."""

    method: str  # gptq, awq, one of BY_ROWS, or a type of GGUF's BLOCKS
    bits: int
    group_size: int  # inputs that share a scale; -1 is all
    is_ordered: bool = True  # GPTQ: groups are consecutive

    def __str__(self) -> str:
        return f"{self.method} {self.bits} bits" + ("" if self.is_ordered else " by g_idx")

    def joined_bytes(self, shape: Sequence[int]) -> int:
        """Scratch bytes of a matrix's scales of two levels, which are joined; 0 for those of one."""
        has_whole = BY_ROWS.get(self.method, ("", False))[1]
        return room_bytes((math.prod(shape) // self.group_size,), torch.float32) if has_whole else 0

    def sample(self, outputs: int, inputs: int) -> PackedSample:
        """A random matrix; `outputs` and `inputs` must be multiples of words and groups."""
        rng, group = np.random.default_rng(0), inputs if self.group_size < 0 else self.group_size

        def words(*shape: int) -> NDArray[Any]:
            return rng.integers(-(1 << 31), 1 << 31, shape).astype(np.int32)

        def scales(*shape: int) -> NDArray[Any]:
            return rng.uniform(0.001, 0.01, shape).astype(np.float16)

        if self.method in BLOCKS:
            values, block_bytes = BLOCKS[self.method]
            blocks = rng.integers(0, 64, (outputs, inputs // values * block_bytes), np.uint8)  # no scale is too large
            return _sample(lambda place: Blocks(place, self.method), blocks)
        per_word, num_groups = WORD_BITS // self.bits, inputs // group
        order = rng.permutation(np.arange(inputs) // group).astype(np.int32)
        orders = () if self.is_ordered else (order,)
        if self.method in BY_ROWS:
            dtype, has_whole = BY_ROWS[self.method]
            numbers = rng.integers(0, E4M3_NAN, (outputs, inputs * self.bits // 8), np.uint8)

            def by_rows(numbers: TensorPlace, scales: TensorPlace, more: TensorPlace | None = None) -> Scaled:
                scales = replace(scales, dtype=FLOAT8 if has_whole else EXPONENTS) if dtype == FLOAT4 else scales
                groups, whole = (None, more) if has_whole else (more, None)
                return Scaled(replace(numbers, dtype=dtype), scales, None, groups, self.bits, (1, group), whole)

            packed, shape = numbers.view(np.int32) if dtype == WORDS else numbers, (outputs, -(-inputs // group))
            own = rng.integers(112, 127, shape, np.uint8) if dtype == FLOAT4 else scales(*shape)
            return _sample(by_rows, packed, own, *([np.full(1, 0.01, np.float32)] if has_whole else orders))
        zeros, own_scales = words(num_groups, outputs // per_word), scales(num_groups, outputs)
        if self.method == "awq":
            return _sample(Awq, words(inputs, outputs // per_word), zeros, own_scales)
        parts = words(inputs // per_word, outputs), zeros, own_scales
        return _sample(lambda w, z, s, g=None: Gptq(w, z, s, g, self.bits, 1), *parts, *orders)


@dataclass(frozen=True, slots=True)
class PackedSample:
    """A packed matrix."""

    source: TensorSource
    raw: tuple[torch.Tensor, ...]  # its tensors' bytes, on the host

    @property
    def packed_bytes(self) -> int:
        """Bytes read for the matrix."""
        return sum(part.nbytes for part in self.raw)


def _sample(make: Callable[..., TensorSource], *arrays: NDArray[Any]) -> PackedSample:
    places = [
        TensorPlace(f"{number}", Path(), 0, array.nbytes, KINDS[str(array.dtype)], array.shape)
        for number, array in enumerate(arrays)
    ]
    return PackedSample(make(*places), tuple(torch.from_numpy(array).view(torch.uint8).flatten() for array in arrays))
