"""A random model small enough to be served many times over on one machine, for tests and for chaos."""

from __future__ import annotations

# isort: off
import bough.model  # noqa: F401  # before torch, see there
# isort: on

from pathlib import Path
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    modeling_utils,
)

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
CHAT_TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    '{% for call in m.tool_calls or [] %}{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
    "{{ '\n' }}{% endfor %}assistant:"
)


def save_tokenizer(folder: Path, swapped: bool = False) -> None:
    """A tokenizer of bytes with four merges' worth of unused ids and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if swapped:
        alphabet[5], alphabet[6] = alphabet[6], alphabet[5]
    vocab = {token: index for index, token in enumerate([*alphabet, "<u0>", "<u1>", "<u2>", "<u3>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def save_weights(model: PreTrainedModel, folder: Path, max_shard_size: str = "5GB") -> None:
    """Save a model without importing torch's compiler, as transformers does to find out whether it has compiled it."""
    with patch.object(modeling_utils, "unwrap_model", lambda model, *_, **__: model):
        model.save_pretrained(folder, max_shard_size=max_shard_size)


def save_model(folder: Path, config: PretrainedConfig = TINY, seed: int = 0) -> Path:
    """A random model of any architecture, with the tokenizer above."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = config.eos_token_id
    save_weights(model, folder, max_shard_size="200KB")
    save_tokenizer(folder)
    return folder
