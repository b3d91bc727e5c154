"""Small random models whose layers are compiled whole, and a context and a tree for them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from bough.trees.tree import Tree
from loadtest.common.tiny_model import TINY, save_model

SIZES = {key: getattr(TINY, key) for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
SIZES |= {"num_hidden_layers": 3, "num_key_value_heads": 2, "initializer_range": 0.2, "bos_token_id": 260}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "tied, wide heads": LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=40),
    "mistral": MistralConfig(**SIZES, sliding_window=24),
    "qwen2": Qwen2Config(
        **SIZES, layer_types=["full_attention", "sliding_attention", "full_attention"],
        use_sliding_window=True, sliding_window=20,
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}  # fmt: skip
CONTEXT = [(7 * i * i + 3 * i) % 259 for i in range(70)]
TREE = Tree.of([5, 9, 11, 12, 13, 200, 201], [-1, 0, 0, 1, 1, 2, 5], [0.0] + [-1.0] * 6)


def perturbed(folder: Path, family: str) -> Path:
    """A random model of a family, none of whose parts could be left out unnoticed."""
    save_model(folder, FAMILIES[family])
    for ending in ("bias", "norm.weight"):
        perturb(folder, ending, 1.0)
    return folder


def perturb(folder: Path, ending: str, spread: float) -> None:
    """Biases and norms of a random model are 0 and 1: those left out would not be missed."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for index, name in enumerate(sorted(tensors)):
            if name.endswith(ending):
                torch.manual_seed(index)
                tensors[name] += spread * torch.rand_like(tensors[name])
        save_file(tensors, file, metadata={"format": "pt"})
