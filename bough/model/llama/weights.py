"""Weights of a Llama-like model in the form of `bough.model.llama.layer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bough.model.cpu.gemm import GROUP
from bough.model.cpu.llvm_vectors import LANES
from bough.model.cpu.operands import LINE, LINE_WORDS
from bough.model.llama.layer import LayerWorkspace, Sizes
from bough.model.llama.rows import Floats
from bough.model.loading.loading import Skeleton

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")  # other models use transformers' layers
RowsOf = Callable[[int, int], NDArray[np.int32] | NDArray[np.uint32]]  # from a number of blocks and of inputs


def supports_fused_layers(skeleton: Skeleton) -> bool:
    """Whether the compiled layers support a model."""
    config, kv = skeleton.config, skeleton.kv_shape()
    layer: Any = skeleton.layers[0]  # a class of transformers, without typed attributes
    return (
        skeleton.dtype == torch.bfloat16
        and config.model_type in ARCHITECTURES
        and config.hidden_act == "silu"
        and layer.self_attn.o_proj.bias is None
        and layer.mlp.down_proj.bias is None
        and config.hidden_size % GROUP == config.intermediate_size % GROUP == kv.head_dim % 2 == 0
        and kv.num_kv_heads * kv.head_dim >= GROUP
    )


def supports_fused_int8(skeleton: Skeleton) -> bool:
    """Whether the compiled layers support a model with products in 8 bits, whose inputs must fill whole lines."""
    if not supports_fused_layers(skeleton):
        return False
    config, kv = skeleton.config, skeleton.kv_shape()
    widths = config.hidden_size, config.intermediate_size, config.num_attention_heads * kv.head_dim
    return all(width % LINE == 0 for width in widths) and kv.num_kv_heads * kv.head_dim % GROUP == 0


def sizes_of(skeleton: Skeleton) -> Sizes:
    """Sizes of a model's layers."""
    config, kv = skeleton.config, skeleton.kv_shape()
    first: Any = skeleton.layers[0]
    heads, scale = int(config.num_attention_heads), float(first.self_attn.scaling)
    return Sizes(heads, kv.num_kv_heads, kv.head_dim, scale, config.rms_norm_eps)


class Matrices(NamedTuple):
    """Matrices of a layer, (outputs, inputs) each."""

    queries: Any
    keys: Any
    values: Any
    out: Any
    gate: Any
    up: Any
    down: Any

    @classmethod
    def of(cls, layer: Any) -> Matrices:
        """The matrices of a decoder layer; memory is shared with it."""
        attention, mlp = layer.self_attn, layer.mlp
        own = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        return cls(*(linear.weight.detach() for linear in (*own, mlp.gate_proj, mlp.up_proj, mlp.down_proj)))


class Vectors(NamedTuple):
    """Vectors of a layer, in float32."""

    attention_norm: Floats
    bias: Floats  # of queries, keys and values
    query_norm: Floats  # (0,) if there is none
    key_norm: Floats
    mlp_norm: Floats

    @classmethod
    def of(cls, layer: Any) -> Vectors:
        """Copies of the layer's vectors."""
        attention = layer.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        query_norm, key_norm = (np.zeros(0, np.float32) if norm is None else floats(norm.weight) for norm in norms)
        return cls(
            floats(layer.input_layernorm.weight),
            biases(*projections),
            query_norm,
            key_norm,
            floats(layer.post_attention_layernorm.weight),
        )


def biases(*projections: Any) -> Floats:
    """Concatenated biases of linear layers; 0 for a layer without bias."""
    return floats(torch.cat([p.weight.new_zeros(p.out_features) if p.bias is None else p.bias for p in projections]))


def floats(values: torch.Tensor) -> Floats:
    """A copy in float32."""
    copied: Floats = values.detach().float().numpy().copy()
    return copied


def window(layer: Any, architecture: str) -> int:
    """A layer's sliding window, 0 for unlimited: Mistral has one for the model, Qwen one for each layer."""
    attention = layer.self_attn
    holder = attention.config if architecture == "mistral" else attention
    return int(getattr(holder, "sliding_window", None) or 0)


def num_blocks(num_rows: int) -> int:
    """Number of blocks for `num_rows` rows."""
    return -(-num_rows // LANES)


def word_rows(blocks: int, inputs: int) -> NDArray[np.int32]:
    """Buffer for rows of products in 16 bits."""
    return np.zeros((blocks, inputs // 2, LANES), np.int32)


def code_rows(blocks: int, inputs: int) -> NDArray[np.uint32]:
    """Buffer for rows of products in 8 bits."""
    return np.zeros((blocks, inputs // LINE * LINE_WORDS, LANES), np.uint32)


class Workspace:
    """Buffers that grow to the largest pass so far."""

    def __init__(self, skeleton: Skeleton, make_rows: RowsOf) -> None:
        """Allocate one block; `make_rows` allocates rows of products."""
        self._sizes, self._make_rows = sizes_of(skeleton), make_rows
        self._hidden, self._intermediate = int(skeleton.config.hidden_size), int(skeleton.config.intermediate_size)
        self._buffers = self._allocate(1)

    def of(self, blocks: int) -> LayerWorkspace:
        """Buffers for `blocks` blocks of rows; valid until the next call."""
        most = len(self._buffers.hidden)
        if blocks > most:
            self._buffers, most = self._allocate(blocks), blocks
        return LayerWorkspace._make(part[: len(part) // most * blocks] for part in self._buffers)

    def _allocate(self, blocks: int) -> LayerWorkspace:
        rows, attended = blocks * LANES, self._sizes.num_heads * self._sizes.head_dim
        qkv = attended + 2 * self._sizes.num_kv_heads * self._sizes.head_dim
        return LayerWorkspace(
            np.zeros((blocks, self._hidden, LANES), np.float32),
            self._make_rows(blocks, self._hidden),
            np.zeros((rows, qkv), np.float32),
            np.zeros((rows, attended), np.uint16),
            np.zeros((blocks, attended, LANES), np.float32),
            self._make_rows(blocks, attended),
            np.zeros((blocks, self._intermediate, LANES), np.float32),
            np.zeros((blocks, self._intermediate, LANES), np.float32),
            self._make_rows(blocks, self._intermediate),
        )
