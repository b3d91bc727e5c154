"""The formats of packed weights that can be read, by what config.json calls them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from bough.errors import CheckpointError
from bough.model.quant.awq import AwqFormat
from bough.model.quant.bough_format import BoughFormat
from bough.model.quant.format import QuantFormat
from bough.model.quant.gptq import GptqFormat

FORMATS: dict[str, type[QuantFormat]] = {each.method: each for each in (BoughFormat, GptqFormat, AwqFormat)}


def format_of(config: PretrainedConfig, folder: Path) -> QuantFormat | None:
    """That of a checkpoint; None for one in 16 or 32 bits.

    Raises:
        CheckpointError: packed in a way that cannot be read here.
    """
    entry = getattr(config, "quantization_config", None)
    if not entry:
        return None
    fields: dict[str, Any] = entry if isinstance(entry, dict) else entry.to_dict()
    method, where = str(fields.get("quant_method", "")), f"{folder / 'config.json'}: quantization_config"
    if method not in FORMATS:
        raise CheckpointError(
            f"{where}.quant_method: {method!r} cannot be read; {', '.join(FORMATS)} can, and checkpoints in 16 bits"
        )
    return FORMATS[method].of(fields, where)
