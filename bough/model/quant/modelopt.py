"""Checkpoints of NVIDIA's ModelOpt: E2M1 numbers with two levels of scales (NVFP4), or E4M3 numbers with one scale."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from bough.errors import CheckpointError
from bough.model.architecture.moe import Experts
from bough.model.checkpoint.checkpoint import TensorPlace
from bough.model.quant.format import PackedTensors, module_names
from bough.model.quant.scaled import FLOAT4, FLOAT8, SPARE, WHOLE_FACTOR, Scaled, Scheme, nvfp4, unquantized

STORED = {"NVFP4": nvfp4(WHOLE_FACTOR), "FP8": Scheme(FLOAT8, 8, "tensor")}  # by `quant_algo`
KEPT_NAMES = ("ignore", "exclude_modules")  # in config.json


@dataclass(frozen=True, slots=True)
class ModeloptFormat:
    """Weights of one of `STORED`."""

    stored: Scheme
    kept: tuple[str, ...]  # patterns of modules that are stored unquantized, with all within them
    note: str
    method = "modelopt"
    is_transposed = False
    spare = SPARE

    @classmethod
    def of(cls, fields: Mapping[str, Any], where: str) -> ModeloptFormat:
        """Read `quantization_config`. Raises CheckpointError."""
        if (algorithm := fields.get("quant_algo")) not in STORED:
            raise CheckpointError(f"{where}.quant_algo: must be {' or '.join(STORED)}, got {algorithm!r}")
        name = next((name for name in KEPT_NAMES if fields.get(name)), KEPT_NAMES[0])
        kept = module_names(fields.get(name) or (), f"{where}.{name}")
        changed = [key for key in ("kv_cache_scheme", "kv_cache_quant_algo") if fields.get(key)]
        return cls(STORED[algorithm], kept, unquantized(["quant_algo", *changed]))

    @property
    def bits(self) -> int:
        """Bits of every weight."""
        return self.stored.bits

    def __str__(self) -> str:
        return f"{self.bits} bits ({self.method})"

    def weight_name(self, place: TensorPlace) -> str | None:
        """The name itself, of a matrix X.weight in few bits."""
        return place.name if place.name.endswith(".weight") and place.dtype in (FLOAT4, FLOAT8) else None

    def source(self, tensor: str, tensors: PackedTensors) -> Scaled | Experts:
        """Take numbers and scales. Raises CheckpointError."""
        return self.stored.source(tensor, (f"{tensor}_scale",), tensors)

    def scheme(self, modules: Collection[str]) -> Scheme | None:
        """The scheme of a module with one of these names according to config.json; None for unquantized ones."""
        patterns = [pattern for kept in self.kept for pattern in (kept, f"{kept}.*")]
        is_kept = any(fnmatchcase(module, pattern) for pattern in patterns for module in modules)
        return None if is_kept else self.stored
