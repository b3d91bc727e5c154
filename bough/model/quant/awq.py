"""AWQ's "gemm" format, as written by AutoAWQ: 4 bits, packed along outputs in an interleaved order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bough.errors import CheckpointError
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.tensor_source import typed
from bough.model.packed import Across
from bough.model.quant.format import (
    SAMPLE_GROUP,
    Dequantized,
    PackedTensors,
    WordsFormat,
    bits_of,
    place_of,
    require_groups,
    require_shape,
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

    def packed(self, raw: Sequence[torch.Tensor]) -> Across:
        return Across(*(typed(*part) for part in zip(raw, self.places, strict=True)))
