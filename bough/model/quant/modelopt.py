"""Checkpoints of NVIDIA's ModelOpt: E2M1 numbers with two levels of scales (NVFP4), or E4M3 numbers with one scale."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from bough.errors import CheckpointError
from bough.model.architecture.moe import ExpertSources
from bough.model.checkpoint.checkpoint import TensorPlace
from bough.model.quant.format import PackedTensors, kept_modules
from bough.model.quant.scaled import (
    FLOAT4,
    FLOAT8,
    SPARE,
    WHOLE_FACTOR,
    Scaled,
    SchemeFormat,
    StoredAs,
    nvfp4,
    unquantized,
)

STORED = {"NVFP4": nvfp4(WHOLE_FACTOR), "FP8": StoredAs(FLOAT8, 8, "tensor")}  # by `quant_algo`


@dataclass(frozen=True, slots=True)
class ModeloptFormat(SchemeFormat):
    """Weights of one of `STORED`."""

    stored: StoredAs
    bits: int
    kept: tuple[str, ...]  # patterns of modules that are stored unquantized, with all within them
    note: str
    method = "modelopt"
    spare = SPARE

    @classmethod
    def of(cls, fields: Mapping[str, Any], where: str) -> ModeloptFormat:
        """Read `quantization_config`. Raises CheckpointError."""
        if (algorithm := fields.get("quant_algo")) not in STORED:
            raise CheckpointError(f"{where}.quant_algo: must be {' or '.join(STORED)}, got {algorithm!r}")
        kept = kept_modules(fields, where, "ignore", "exclude_modules")
        changed = [key for key in ("kv_cache_scheme", "kv_cache_quant_algo") if fields.get(key)]
        return cls(STORED[algorithm], STORED[algorithm].bits, kept, unquantized(["quant_algo", *changed]))

    def weight_name(self, place: TensorPlace) -> str | None:
        """The name itself, of a matrix X.weight in few bits."""
        return place.name if place.name.endswith(".weight") and place.dtype in (FLOAT4, FLOAT8) else None

    def source(self, tensor: str, tensors: PackedTensors) -> Scaled | ExpertSources:
        """Take numbers and scales. Raises CheckpointError."""
        return self.stored.source(tensor, (f"{tensor}_scale",), tensors)

    def scheme(self, modules: Collection[str]) -> StoredAs | None:
        patterns = [pattern for kept in self.kept for pattern in (kept, f"{kept}.*")]
        is_kept = any(fnmatchcase(module, pattern) for pattern in patterns for module in modules)
        return None if is_kept else self.stored
