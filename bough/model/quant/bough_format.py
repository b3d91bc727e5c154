"""bough's own format: 4 or 8 bits, in groups along each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch

from bough.errors import CheckpointError
from bough.model.checkpoint.checkpoint import TensorPlace
from bough.model.checkpoint.tensor_source import typed
from bough.model.cpu.float_bits import from_half, put_number
from bough.model.cpu.jit import strict_parallel
from bough.model.gpu.kernels import kernels_on
from bough.model.quant.format import (
    Dequantized,
    PackedTensors,
    QuantFormat,
    bits_of,
    require_groups,
    require_matrix,
    require_shape,
    write_out,
)

PACKED_SUFFIX, SCALES_SUFFIX = ".packed", ".packed_scales"  # of a weight's name
MIXED = "mixed"  # in config.json, instead of a number of bits
BITS = {"U8": 4, "I8": 8}  # by dtype of the integers
SIZES = tuple(2**exponent for exponent in range(1, 13))  # of a group


@dataclass(frozen=True, slots=True)
class BoughFormat(QuantFormat):
    """The format that `bough pack` writes; `bits` is 0 if it differs by weight."""

    bits: int
    method = "bough"

    @classmethod
    def of(cls, fields: Mapping[str, Any], where: str) -> BoughFormat:
        """Read `quantization_config`. Raises CheckpointError."""
        return cls(0 if fields.get("bits") == MIXED else bits_of(fields, where, (4, 8)))

    def weight_name(self, place: TensorPlace) -> str | None:
        """X for "X.packed"."""
        return place.name.removesuffix(PACKED_SUFFIX) if place.name.endswith(PACKED_SUFFIX) else None

    def source(self, tensor: str, tensors: PackedTensors) -> Packed:
        """Take integers and scales. Raises CheckpointError."""
        packed = tensors.take(tensor, [dtype for dtype, bits in BITS.items() if self.bits in (0, bits)])
        require_matrix(packed)
        scales = tensors.take(tensor.removesuffix(PACKED_SUFFIX) + SCALES_SUFFIX, ("F16",), packed)
        bits, num_groups = BITS[packed.dtype], scales.shape[-1] if scales.shape else 0
        inputs = packed.shape[1] * 8 // bits
        require_groups(scales, inputs, num_groups)
        size = inputs // num_groups
        if size not in SIZES:  # in 4 bits two halves of a group share bytes, and GPU kernels need powers of two
            raise CheckpointError(
                f"{scales.file}: tensor {scales.name} makes groups of {size} inputs; must be a power of two from "
                f"{SIZES[0]} to {SIZES[-1]}"
            )
        require_shape(scales, (2 if bits == 4 else 1, packed.shape[0], num_groups))
        return Packed(packed, scales, bits)


@strict_parallel
def _unpack4(packed: Any, scales: Any, out: Any) -> Any:
    """Dequantize packed (rows, columns / 2) uint8 by scales (2, rows, groups) float16 bits to out (rows, columns)."""
    _, rows, groups = scales.shape
    half = packed.shape[1] // groups
    for row in numba.prange(rows):
        for group in range(groups):
            scale, offset = from_half(scales[0, row, group]), from_half(scales[1, row, group])
            begin = 2 * half * group
            for j in range(half):
                byte = np.int32(packed[row, half * group + j])
                put_number(out, (row, begin + j), np.float32(byte & 15) * scale + offset)
                put_number(out, (row, begin + half + j), np.float32(byte >> 4) * scale + offset)


@strict_parallel
def _unpack8(packed: Any, scales: Any, out: Any) -> Any:
    """Dequantize packed (rows, columns) int8 by scales (1, rows, groups) float16 bits to out (rows, columns)."""
    _, rows, groups = scales.shape
    size = packed.shape[1] // groups
    for row in numba.prange(rows):
        for group in range(groups):
            scale, begin = from_half(scales[0, row, group]), size * group
            for j in range(begin, begin + size):
                put_number(out, (row, j), np.float32(packed[row, j]) * scale)


@dataclass(frozen=True, slots=True)
class Packed(Dequantized):
    """A weight in bough's format: integers in groups along each row, signed in 8 bits, 0 to 15 in 4 bits.

    In 4 bits a byte holds elements j and j + group / 2 of its group, so that a group unpacks into two runs.
    """

    packed: TensorPlace  # (rows, columns / 2) U8, or (rows, columns) I8
    scales: TensorPlace  # (1, rows, groups) F16, or in 4 bits (2, rows, groups): scales, then offsets
    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.packed.shape[0], self.packed.shape[1] * 8 // self.bits)

    def _write(self, raw: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        packed, scales = typed(raw[0], self.packed), typed(raw[1], self.scales)
        if kernels := kernels_on(out.device):
            kernels.write_own(packed, scales, self.bits, out)
            return
        write_out(out, _unpack4 if self.bits == 4 else _unpack8, packed, scales)
