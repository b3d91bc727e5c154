"""Small random models of every family that is run, and trees of random shape."""

from __future__ import annotations

import copy

import numpy as np
from transformers import (
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MiniCPM3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Starcoder2Config,
)

from bough.model.architecture.architecture import cut_layers
from bough.trees.tree import Tree

COMMON = {
    "vocab_size": 262,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 260,
    "eos_token_id": 261,
    "pad_token_id": 261,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.3 * i for i in range(8)],
}
LATENT = {name: value for name, value in COMMON.items() if name not in ("head_dim", "num_key_value_heads")} | {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON),
    "mistral, sliding window": MistralConfig(**COMMON, sliding_window=12),
    "qwen2": Qwen2Config(**COMMON),
    "qwen3": Qwen3Config(**COMMON),
    "gemma2, soft-capping, alternating windows": Gemma2Config(**COMMON, sliding_window=12, query_pre_attn_scalar=16),
    "gemma3, local and global": Gemma3TextConfig(
        **COMMON, sliding_window=12, query_pre_attn_scalar=16, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "phi3": Phi3Config(**{**COMMON, "hidden_size": 64}),
    "olmo2": Olmo2Config(**COMMON),
    "phi3, two rotary tables": Phi3Config(
        **{**COMMON, "rope_parameters": LONGROPE, "max_position_embeddings": 512},
        original_max_position_embeddings=256,
    ),
    "mixtral": MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen2 moe, shared expert": Qwen2MoeConfig(
        **COMMON,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[1],
    ),
    "qwen3 moe": Qwen3MoeConfig(**COMMON, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=48),
    "gpt-oss, sinks, alternating windows": GptOssConfig(
        **COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=12
    ),
    "cohere, one norm for both halves": CohereConfig(**COMMON),
    "granite, scaled": GraniteConfig(**COMMON, logits_scaling=2.0, residual_multiplier=0.5),
    "starcoder2, biases": Starcoder2Config(**COMMON, use_bias=True),
    "deepseek v2, no rank of queries": DeepseekV2Config(
        **{**LATENT, "q_lora_rank": None}, **ROUTED, first_k_dense_replace=1, topk_method="group_limited_greedy"
    ),
    "deepseek v3, yarn": DeepseekV3Config(**LATENT, **ROUTED, first_k_dense_replace=1, rope_parameters=YARN),
    "glm4 moe lite": Glm4MoeLiteConfig(**LATENT, **ROUTED),
    "minicpm3, latents and no experts": MiniCPM3Config(**LATENT),
    "qwen3 next, recurrent layers": Qwen3NextConfig(**COMMON, **LINEAR, **EXPERTS, mlp_only_layers=[1]),
    "qwen3.5, recurrent layers": Qwen3_5TextConfig(**COMMON, **LINEAR),
    "qwen3.5 moe, recurrent layers": Qwen3_5MoeTextConfig(**COMMON, **LINEAR, **EXPERTS),
}
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
MIXTURES = [name for name, config in FAMILIES.items() if any(hasattr(config, count) for count in COUNTS)]

# One of each kind of layer: plain, with windows, mixtures, latents, and recurrent.
KINDS = [
    "llama",
    "gemma2, soft-capping, alternating windows",
    "mixtral",
    "deepseek v3, yarn",
    "qwen3 next, recurrent layers",
]


def of_two_layers(family: str) -> PretrainedConfig:
    """The family's model of two of its layers, which are of all kinds that it has."""
    config = copy.deepcopy(FAMILIES[family])
    kinds = getattr(config, "layer_types", None) or []
    first = 0 if {*kinds[:2]} == {*kinds} else 1
    cut_layers(config, (first, first + 1))
    assert {*(getattr(config, "layer_types", None) or [])} == {*kinds}
    return config


def random_tree(rng: np.random.Generator, size: int, root: int) -> Tree:
    """A tree whose nodes have any of the six before them as parents."""
    parents = [-1] + [int(rng.integers(max(0, node - 6), node)) for node in range(1, size)]
    tokens = [root] + [node % 256 for node in range(1, size)]
    return Tree.of(tokens, parents, [0.0] * size)
