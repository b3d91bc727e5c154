"""A random model small enough to be served many times over on one machine, for tests and for chaos."""

from __future__ import annotations

# isort: off
import bough.model  # noqa: F401  # before torch, see there
# isort: on

from pathlib import Path
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, modeling_utils

from loadtest.common.tiny_tokenizer import save_tokenizer

TINY = LlamaConfig(
    vocab_size=262,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=260,
    eos_token_id=261,
    initializer_range=0.3,  # large enough that a random model's choices are not all ties
)
SMALLEST = LlamaConfig(
    vocab_size=262,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=128,
    bos_token_id=260,
    eos_token_id=261,
    initializer_range=0.3,
)


def save_weights(model: PreTrainedModel, folder: Path, max_shard_size: str = "5GB") -> None:
    """Save a model without importing torch's compiler, as transformers does to find out whether it has compiled it."""
    with patch.object(modeling_utils, "unwrap_model", lambda model, *_, **__: model):
        model.save_pretrained(folder, max_shard_size=max_shard_size)


def save_model(
    folder: Path, config: PretrainedConfig = TINY, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """A random model of any architecture, with a tokenizer of bytes."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = config.eos_token_id
    save_weights(model, folder, max_shard_size="200KB")
    save_tokenizer(folder)
    return folder
