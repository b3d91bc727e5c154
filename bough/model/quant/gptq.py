"""GPTQ's format, as written by AutoGPTQ and GPTQModel: integers packed along inputs, the weight transposed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from bough.errors import CheckpointError, StreamError
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.tensor_source import typed
from bough.model.packed import Down
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

FIRST, SECOND = "gptq", "gptq_v2"  # versions of the format, by their names in config.json


@dataclass(frozen=True, slots=True)
class GptqFormat(WordsFormat):
    """GPTQ in 4 or 8 bits, with or without act-order."""

    bits: int
    zero_offset: int = 0  # 1 if the file stores zero - 1, as version 1 of the format does
    method = "gptq"
    samples: ClassVar = {
        "gptq 4 bits": lambda outputs, inputs: _sample(outputs, inputs, 4),
        "gptq 8 bits": lambda outputs, inputs: _sample(outputs, inputs, 8),
        "gptq 4 bits by g_idx": lambda outputs, inputs: _sample(outputs, inputs, 4, is_ordered=False),
    }

    @classmethod
    def of(cls, fields: Mapping[str, Any], where: str) -> GptqFormat:
        """Read `quantization_config`. Raises CheckpointError."""
        name = "checkpoint_format" if fields.get("checkpoint_format") else "format"  # the name in newer files
        version = str(fields.get(name) or FIRST).lower()
        if version not in (FIRST, SECOND):
            raise CheckpointError(f"{where}.{name}: must be {FIRST!r} or {SECOND!r}, got {fields[name]!r}")
        return cls(bits_of(fields, where, (4, 8)), 1 if version == FIRST else 0)

    def source(self, tensor: str, tensors: PackedTensors) -> Gptq:
        """Take integers, zeros, scales, and group indices if there are any. Raises CheckpointError."""
        base, (integers, zeros, scales) = tensor.removesuffix(".qweight"), self._take(tensor, tensors)
        groups = tensors.take(f"{base}.g_idx", ("I32",)) if f"{base}.g_idx" in tensors else None
        num_groups, per_word = scales.shape[0] if scales.shape else 0, 32 // self.bits
        source = Gptq(integers, zeros, scales, groups, self.bits, self.zero_offset)
        outputs, inputs = source.shape
        if outputs % per_word:
            raise CheckpointError(
                f"{zeros.file}: tensor {zeros.name} must be whole words of {per_word} outputs, got {outputs}"
            )
        require_shape(scales, (num_groups, outputs))
        require_shape(zeros, (num_groups, outputs // per_word))
        if groups is None:
            require_groups(scales, inputs, num_groups)
            return source
        require_shape(groups, (inputs,))
        return replace(source, groups=tensors.unless_in_order(groups, num_groups))


def _sample(outputs: int, inputs: int, bits: int, is_ordered: bool = True) -> Gptq:
    num_groups, per_word = inputs // SAMPLE_GROUP, 32 // bits
    words, zeros = place_of("I32", inputs // per_word, outputs), place_of("I32", num_groups, outputs // per_word)
    groups = None if is_ordered else place_of("I32", inputs)
    return Gptq(words, zeros, place_of("F16", num_groups, outputs), groups, bits, 1)


@dataclass(frozen=True, slots=True)
class Gptq(Dequantized):
    """A weight in GPTQ's format."""

    words: TensorPlace  # qweight (inputs / per word, outputs) I32
    zeros: TensorPlace  # qzeros (groups, outputs / per word) I32
    scales: TensorPlace  # (groups, outputs) F16
    groups: TensorPlace | None  # g_idx (inputs,) I32: group of each input; None if consecutive
    bits: int
    zero_offset: int
    is_transposed = True

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.words.shape[1], self.words.shape[0] * 32 // self.bits)

    @property
    def order(self) -> tuple[TensorPlace | None, int]:
        return self.groups, self.scales.shape[0]

    def packed(self, raw: Sequence[torch.Tensor]) -> Down:
        words, zeros, scales, *groups = (typed(*part) for part in zip(raw, self.places, strict=True))
        group_of = self._checked(groups[0]) if groups else None
        return Down(words, zeros, scales, group_of, self.bits, self.zero_offset)

    def _checked(self, groups: torch.Tensor) -> torch.Tensor:
        """Check group indices again on a CPU, whose kernels rely on them, as the file may have changed."""
        if groups.device.type != "cpu":
            return groups
        num_groups = self.scales.shape[0]
        if not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
            raise StreamError(f"{self.words.file}: g_idx of {self.words.name} names groups beyond its {num_groups}")
        return groups
