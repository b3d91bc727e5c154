"""Checkpoints of NVIDIA's ModelOpt: E2M1 numbers with two levels of scales (NVFP4), or E4M3 numbers with one scale."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import PretrainedConfig

from bough.errors import CheckpointError
from bough.model.architecture.moe import ExpertSources
from bough.model.checkpoint.container import TensorPlace
from bough.model.quant.format import PackedTensors, WeightFormat, quantization_fields
from bough.model.quant.scaled import (
    FLOAT4,
    FLOAT8,
    SPARE,
    WHOLE_FACTOR,
    Scaled,
    StoredAs,
    nvfp4,
    unquantized,
)

OWN_FILE = "hf_quant_config.json"  # ModelOpt's own, next to config.json
STORED = {"NVFP4": nvfp4(WHOLE_FACTOR), "FP8": StoredAs(FLOAT8, 8, "tensor")}  # by `quant_algo`


@dataclass(frozen=True, slots=True)
class ModeloptFormat(WeightFormat):
    """Weights of one of `STORED`."""

    stored: StoredAs
    bits: int
    note: str
    method = "modelopt"
    spare = SPARE
    samples: ClassVar = {"nvfp4 4 bits": STORED["NVFP4"].sample}

    @classmethod
    def found(cls, config: PretrainedConfig, path: Path) -> tuple[Mapping[str, Any], str] | None:
        """Also reads ModelOpt's own file, as older versions did not change config.json."""
        file = path / OWN_FILE
        if quantization_fields(config) or not file.is_file():
            return super(ModeloptFormat, cls).found(config, path)
        try:
            fields = json.loads(file.read_bytes())["quantization"]
            # Without an algorithm it quantizes only caches.
            return (fields, f"{file}: quantization") if fields.get("quant_algo") else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
            raise CheckpointError(f"{file}: must be JSON with an object quantization: {exc!r}") from exc

    @classmethod
    def of(cls, fields: Mapping[str, Any], where: str) -> ModeloptFormat:
        """Read `quantization_config`. Raises CheckpointError."""
        if (algorithm := fields.get("quant_algo")) not in STORED:
            raise CheckpointError(f"{where}.quant_algo: must be {' or '.join(STORED)}, got {algorithm!r}")
        changed = [key for key in ("kv_cache_scheme", "kv_cache_quant_algo") if fields.get(key)]
        return cls(STORED[algorithm], STORED[algorithm].bits, unquantized(["quant_algo", *changed]))

    def weight_name(self, place: TensorPlace) -> str | None:
        """The name itself, of a matrix X.weight in few bits."""
        return place.name if place.name.endswith(".weight") and place.dtype in (FLOAT4, FLOAT8) else None

    def source(self, tensor: str, tensors: PackedTensors) -> Scaled | ExpertSources:
        """Take numbers and scales. Raises CheckpointError."""
        return self.stored.source(tensor, (f"{tensor}_scale",), tensors)
