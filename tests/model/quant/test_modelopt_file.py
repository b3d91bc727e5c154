"""The file beside config.json in which ModelOpt's older versions say how weights are stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PretrainedConfig

from bough.errors import CheckpointError
from bough.model.quant.formats import format_of
from bough.model.quant.fp8 import Fp8Format
from bough.model.quant.modelopt import ModeloptFormat
from tests.fakes.model.published_formats import FP8


def test_modelopt_s_own_file_counts_where_config_json_says_nothing(tmp_path: Path) -> None:
    file, config = tmp_path / "hf_quant_config.json", PretrainedConfig()
    fields = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": fields}))
    format_ = format_of(config, tmp_path)
    assert format_ == ModeloptFormat.of(fields, "")
    assert isinstance(format_of(PretrainedConfig(quantization_config=FP8), tmp_path), Fp8Format)
    file.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    assert format_of(config, tmp_path) is None
    file.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: quantization\.quant_algo: must be NVFP4 or FP8"):
        format_of(config, tmp_path)
    file.write_text("[]")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: must be JSON with an object quantization"):
        format_of(config, tmp_path)
