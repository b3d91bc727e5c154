"""The supported formats of packed weights, by their names in config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from bough.errors import CheckpointError
from bough.model.checkpoint.gguf_file import is_gguf
from bough.model.quant.awq import AwqFormat
from bough.model.quant.compressed_tensors import CompressedTensorsFormat
from bough.model.quant.format import QuantFormat
from bough.model.quant.fp8 import Fp8Format
from bough.model.quant.gguf import GgufFormat
from bough.model.quant.gptq import GptqFormat
from bough.model.quant.modelopt import ModeloptFormat
from bough.model.quant.mxfp4 import Mxfp4Format

FORMATS: dict[str, type[QuantFormat]] = {
    each.method: each
    for each in (GptqFormat, AwqFormat, CompressedTensorsFormat, Fp8Format, Mxfp4Format, ModeloptFormat)
}


MODELOPT_FILE = "hf_quant_config.json"  # beside config.json, which older versions of ModelOpt leave as it was


def fields_of(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of `quantization_config`; none if weights have 16 or 32 bits."""
    entry = getattr(config, "quantization_config", None) or {}
    return entry if isinstance(entry, dict) else dict(entry.to_dict())


def where_in(folder: Path) -> str:
    """The place of these fields, for error messages."""
    return f"{folder / 'config.json'}: quantization_config"


def format_of(config: PretrainedConfig, folder: Path) -> QuantFormat | None:
    """The format of a checkpoint; None if its weights have 16 or 32 bits.

    Raises:
        CheckpointError: the format is not supported.
    """
    fields, where = fields_of(config), where_in(folder)
    if not fields and (file := folder / MODELOPT_FILE).is_file():
        fields, where = _beside(file), f"{file}: quantization"
    if not fields:
        return None
    if is_gguf(folder):
        return GgufFormat.of(fields, where)
    method = str(fields.get("quant_method", ""))
    if method not in FORMATS:
        raise CheckpointError(
            f"{where}.quant_method: must be one of {', '.join(FORMATS)}, or left out for 16 bits, got {method!r}"
        )
    return FORMATS[method].of(fields, where)


def _beside(file: Path) -> dict[str, Any]:
    """The fields that ModelOpt's own file has; none if it quantizes no weights, but only caches for example."""
    try:
        fields = json.loads(file.read_bytes())["quantization"]
        return {**fields, "quant_method": ModeloptFormat.method} if fields.get("quant_algo") else {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"{file}: must be JSON with an object quantization: {exc!r}") from exc
