"""AWQ's "gemm" format, as written by AutoAWQ: 4 bits, packed along outputs in an interleaved order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numba
import numpy as np
import torch

from bough.errors import CheckpointError
from bough.model.checkpoint.checkpoint import TensorPlace
from bough.model.checkpoint.tensor_source import typed
from bough.model.cpu.float_bits import put_number
from bough.model.cpu.jit import strict_parallel
from bough.model.gpu.kernels import kernels_on
from bough.model.quant.format import (
    SAMPLE_GROUP,
    Dequantized,
    PackedTensors,
    WordsFormat,
    bits_of,
    place_of,
    require_groups,
    require_shape,
    write_out,
)


@dataclass(frozen=True, slots=True)
class AwqFormat(WordsFormat):
    """AWQ, always in 4 bits."""

    bits: int = 4
    method = "awq"
    samples: ClassVar = {"awq 4 bits": lambda outputs, inputs: _sample(outputs, inputs)}

    @classmethod
    def of(cls, fields: Mapping[str, Any], where: str) -> AwqFormat:
        """Read `quantization_config`. Raises CheckpointError."""
        if str(fields.get("version", "gemm")).lower() != "gemm":
            raise CheckpointError(f"{where}.version: must be 'gemm', got {fields['version']!r}")
        return cls(bits_of(fields, where, (4,)))

    def source(self, tensor: str, tensors: PackedTensors) -> Awq:
        """Take integers, zeros and scales. Raises CheckpointError."""
        integers, zeros, scales = self._take(tensor, tensors)
        source, num_groups = Awq(integers, zeros, scales), scales.shape[0] if scales.shape else 0
        outputs, inputs = source.shape
        require_shape(scales, (num_groups, outputs))
        require_shape(zeros, (num_groups, outputs // 8))
        require_groups(scales, inputs, num_groups)
        return source


@strict_parallel
def _unpack_words_across(words: Any, zeros: Any, scales: Any, group_size: Any, out: Any) -> Any:
    """Dequantize words (inputs, outputs / 8) int32 by zeros and scales (groups, outputs) to out (inputs, outputs)."""
    num_inputs, num_words = words.shape
    for k in numba.prange(num_inputs):
        group = k // group_size
        for word in range(num_words):
            for c in range(8):
                n = 8 * word + c
                integer = np.float32((words[k, word] >> np.int32(4 * (c // 2 + 4 * (c % 2)))) & np.int32(15))
                put_number(out, (k, n), (integer - zeros[group, n]) * scales[group, n])


def _sample(outputs: int, inputs: int) -> Awq:
    num_groups = inputs // SAMPLE_GROUP
    scales = place_of("F16", num_groups, outputs)
    return Awq(place_of("I32", inputs, outputs // 8), place_of("I32", num_groups, outputs // 8), scales)


@dataclass(frozen=True, slots=True)
class Awq(Dequantized):
    """A weight in AWQ's format."""

    words: TensorPlace  # qweight (inputs, outputs / 8) I32
    zeros: TensorPlace  # qzeros (groups, outputs / 8) I32
    scales: TensorPlace  # (groups, outputs) F16
    is_transposed = True

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.words.shape[1] * 8, self.words.shape[0])

    def _write(self, raw: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        if kernels := kernels_on(out.device):
            kernels.write_across(*(typed(*part) for part in zip(raw, self.places, strict=True)), out)
            return
        words, zeros, scales = (typed(*part) for part in zip(raw, self.places, strict=True))
        write_out(out, _unpack_words_across, words, _integers(zeros), scales.float(), len(out) // len(scales))


def _integers(words: torch.Tensor) -> torch.Tensor:
    """Unpack (rows, n / 8) int32 to (rows, n) float32: column c of eight is at nibble c / 2, plus 4 if c is odd."""
    column = torch.arange(8, dtype=torch.int32)
    nibbles = column // 2 + 4 * (column % 2)
    return ((words[:, :, None] >> (4 * nibbles)) & 15).flatten(1).float()
