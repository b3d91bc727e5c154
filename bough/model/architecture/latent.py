"""Multi-head latent attention (MLA, DeepSeek V2): slots keep the latents that keys and values are made from.

A token has one latent, of which `kv_b_proj` makes every head's value and the unrotated part of its key, and one rotated
part of the key for all heads. Nothing is expanded here: the head's matrix of keys is applied to the query instead of to
the latents, and its matrix of values to the weighted sum of latents. So attention has a single KV head: its key is the
rotated part and the latent, its value is the latent. The rest of the layer is transformers'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from bough.model.backend import backend_of


def is_latent(module: nn.Module) -> bool:
    """Whether a module is latent attention, which transformers caches compressed and expands by this method."""
    return hasattr(module, "expand_kv")


def why_not_compressed(config: PretrainedConfig, layers: nn.ModuleList) -> str:
    """Why latents of a configuration with `kv_lora_rank` do not fit into slots; empty if they do."""
    for index, layer in enumerate(layers):
        found: list[Any] = [module for module in layer.modules() if is_latent(module)]
        if [attention.layer_idx for attention in found] != [index]:
            return f"layer {index} has {len(found)} attentions with latents (MLA), but slots have room for one"
        (attention,) = found
        if getattr(attention, "indexer", None) is not None:
            return f"layer {index} chooses keys with an indexer, in a way that trees do not allow"
        widths = attention.qk_rope_head_dim, attention.kv_lora_rank
        if widths != (config.qk_rope_head_dim, config.kv_lora_rank) or attention.kv_b_proj.bias is not None:
            return f"layer {index} makes latents of other sizes than config.json says, or adds a bias to them"
    return ""


def keep_compressed(model: nn.Module) -> None:
    """Make latent attention pass the cached latents to `tree_attention` instead of expanding them."""
    module: Any
    for module in filter(is_latent, model.modules()):
        module.expand_kv = _as_cached
        module.kv_b_proj.is_used_by_parts = True


def _as_cached(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (1, 1, rows, rotary width) and values (1, 1, rows, latent width)."""
    return rotated, latents


def absorbed(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Queries (rows, num_heads, rotary width + latent width) of an attention's (1, num_heads, rows, key width)."""
    plain, rotated = torch.split(query[0], [module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    of_keys = _by_head(module)[:, : module.qk_nope_head_dim]
    products = backend_of(query.device).linear_by_head(plain, of_keys.transpose(1, 2))
    return torch.cat((rotated.transpose(0, 1), products), -1)


def expanded(module: Any, attended: torch.Tensor) -> torch.Tensor:
    """Values (rows, num_heads, value width) of weighted sums of latents (rows, num_heads, latent width)."""
    of_values = _by_head(module)[:, module.qk_nope_head_dim :]
    return backend_of(attended.device).linear_by_head(attended.transpose(0, 1), of_values)


def _by_head(module: Any) -> torch.Tensor:
    """Each head's matrices of keys and values, (num_heads, outputs, latent width)."""
    weight: torch.Tensor = module.kv_b_proj.weight
    return weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, weight.shape[1])
