"""FP8 checkpoints as DeepSeek and Qwen publish them: E4M3 numbers with a scale for each block, row or matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from bough.errors import CheckpointError
from bough.model.architecture.moe import ExpertSources
from bough.model.checkpoint.container import TensorPlace
from bough.model.quant.format import SAMPLE_GROUP, PackedTensors, WeightFormat
from bough.model.quant.scaled import FLOAT8, SPARE, Scaled, StoredAs, block_size, unquantized

SCALE_ENDINGS = ("_scale_inv", "_scale")  # both are factors of the numbers


@dataclass(frozen=True, slots=True)
class Fp8Format(WeightFormat):
    """E4M3 weights."""

    stored: StoredAs
    note: str
    method = "fp8"
    bits = 8
    spare = SPARE
    samples: ClassVar = {"fp8 8 bits": StoredAs(FLOAT8, 8, "block", (SAMPLE_GROUP, SAMPLE_GROUP)).sample}

    @classmethod
    def of(cls, fields: Mapping[str, Any], where: str) -> Fp8Format:
        """Read `quantization_config`. Raises CheckpointError."""
        for name, supported in (("fmt", "e4m3"), ("expert_dtype", "fp8")):
            if (found := fields.get(name) or supported) != supported:
                raise CheckpointError(f"{where}.{name}: must be {supported!r}, got {found!r}")
        blocks = fields.get("weight_block_size")
        size = block_size(blocks, f"{where}.weight_block_size") if blocks is not None else (1, 1)
        scheme = StoredAs(FLOAT8, 8, "block" if blocks is not None else "", size)
        changed = [key for key in ("activation_scheme", "kv_cache_scheme") if fields.get(key)]
        return cls(scheme, unquantized(changed))

    def weight_name(self, place: TensorPlace) -> str | None:
        """The tensor's name if it is stored as E4M3; both matrices and stacked experts are."""
        return place.name if place.dtype == FLOAT8 else None

    def source(self, tensor: str, tensors: PackedTensors) -> Scaled | ExpertSources:
        """Take numbers and scales. Raises CheckpointError."""
        return self.stored.source(tensor, [tensor + ending for ending in SCALE_ENDINGS], tensors)
