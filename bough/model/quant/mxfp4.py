"""Experts in MXFP4, as OpenAI publishes gpt-oss: E2M1 numbers with a power of two for each 32 inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bough.errors import CheckpointError
from bough.model.architecture.moe import ExpertSources
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.tensor_source import Transposed, parts_of
from bough.model.quant.format import PackedTensors, WeightFormat, require_shape
from bough.model.quant.scaled import EXPONENTS, FLOAT4, Scaled, StoredAs

BLOCKS, SCALES = "_blocks", "_scales"  # endings of the names of tensors
GROUP, GROUP_BYTES = 32, 16  # inputs that share a scale, and the bytes of their numbers
STORED = StoredAs(FLOAT4, 4, "group", (1, GROUP))


@dataclass(frozen=True, slots=True)
class Mxfp4Format(WeightFormat):
    """Experts of 4 bits; everything else is stored unquantized."""

    method = "mxfp4"
    bits = 4
    samples: ClassVar = {"mxfp4 4 bits": STORED.sample}

    @classmethod
    def of(cls, _fields: Mapping[str, Any], _where: str) -> Mxfp4Format:
        """The tensors have all information."""
        return cls()

    def weight_name(self, place: TensorPlace) -> str | None:
        """X for "X_blocks"."""
        return place.name.removesuffix(BLOCKS) if place.name.endswith(BLOCKS) else None

    def source(self, tensor: str, tensors: PackedTensors) -> ExpertSources:
        """Take numbers (experts, outputs, groups, bytes) and scales; the parameter has each expert transposed.

        Raises:
            CheckpointError: a tensor is missing, or has another dtype or shape.
        """
        blocks = tensors.take(tensor, ("U8",))
        scales = tensors.take(tensor.removesuffix(BLOCKS) + SCALES, ("U8",), blocks)
        if len(blocks.shape) != 4 or blocks.shape[3] != GROUP_BYTES or 0 in blocks.shape:
            raise CheckpointError(
                f"{blocks.file}: tensor {tensor} must have the shape of experts, outputs, groups and {GROUP_BYTES} "
                f"bytes, got {list(blocks.shape)}"
            )
        require_shape(scales, blocks.shape[:3])
        experts, outputs, groups, _ = blocks.shape
        numbers = parts_of(replace(blocks, dtype=FLOAT4, shape=(experts, outputs, groups * GROUP_BYTES)))
        exponents = parts_of(replace(scales, dtype=EXPONENTS))
        matrices = (Scaled(*of, None, None, self.bits, STORED.size) for of in zip(numbers, exponents, strict=True))
        return ExpertSources(tuple(map(Transposed, matrices)))
