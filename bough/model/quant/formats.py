"""The supported formats of packed weights."""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig

from bough.errors import CheckpointError
from bough.model.quant.awq import AwqFormat
from bough.model.quant.compressed_tensors import CompressedTensorsFormat
from bough.model.quant.format import WeightFormat, quantization_fields
from bough.model.quant.fp8 import Fp8Format
from bough.model.quant.gguf import GgufFormat
from bough.model.quant.gptq import GptqFormat
from bough.model.quant.modelopt import ModeloptFormat
from bough.model.quant.mxfp4 import Mxfp4Format

FORMATS: tuple[type[WeightFormat], ...] = (
    GptqFormat,
    AwqFormat,
    CompressedTensorsFormat,
    Fp8Format,
    Mxfp4Format,
    ModeloptFormat,
    GgufFormat,
)
SAMPLES = {name: make for each in FORMATS for name, make in each.samples.items()}


def format_of(config: PretrainedConfig, path: Path) -> WeightFormat | None:
    """The format of a model folder or file; None if its weights have 16 or 32 bits.

    Raises:
        CheckpointError: the format is not supported.
    """
    for each in FORMATS:
        if (found := each.found(config, path)) is not None:
            return each.of(*found)
    if fields := quantization_fields(config):
        names = ", ".join(each.method for each in FORMATS if each is not GgufFormat)
        raise CheckpointError(
            f"{path / 'config.json'}: quantization_config.quant_method: must be one of {names}, or left out for 16 "
            f"bits, got {str(fields.get('quant_method', ''))!r}"
        )
    return None
