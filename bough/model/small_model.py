"""Models of a few thousand random weights, used to compile the kernels that large models call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config, PretrainedConfig, Qwen3_5TextConfig

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,  # the default is outside this vocabulary
    "eos_token_id": None,
    "pad_token_id": None,
}
WHOLE, ATTENTION = LlamaConfig(**SIZES), Olmo2Config(**SIZES)  # with fused layers, and with compiled attention only

HYBRID = Qwen3_5TextConfig(
    **SIZES,
    head_dim=16,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)


def write_small(config: PretrainedConfig, folder: Path) -> Path:
    """Write a float32 checkpoint with random weights; returns the folder."""
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
