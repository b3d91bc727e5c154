"""Models of a few thousand random weights, for whose sake kernels are compiled that large ones call as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config, PretrainedConfig

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,  # of which defaults would be no tokens of so few
    "eos_token_id": None,
    "pad_token_id": None,
}
WHOLE, ATTENTION = LlamaConfig(**SIZES), Olmo2Config(**SIZES)  # layers that are compiled whole, and attention alone


def write_small(config: PretrainedConfig, folder: Path) -> Path:
    """A checkpoint with this configuration, in float32; returns the folder."""
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
