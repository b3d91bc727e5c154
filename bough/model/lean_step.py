"""One pass of a Llama-like decoder over a few rows, compiled whole: no call of Python or torch between its layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.model.lean_attention import attend
from bough.model.packed import rounded
from bough.model.products import compiled, project, project_gated, project_onto
from bough.model.spans import layer_rows
from bough.model.vectors import LANES

Floats = NDArray[np.float32]
Pairs = NDArray[np.int32]
_BITS = np.uint16(0)  # of bfloat16


class Weights(NamedTuple):
    """Of all layers; matrices are flat and laid out by `bough.model.products.packed`."""

    embeddings: Pairs
    attention_norm: Floats  # (num_layers, hidden)
    qkv: Pairs
    qkv_bias: Floats  # (num_layers, queries, keys and values, in whole groups)
    query_norm: Floats  # (num_layers, head_dim), or (num_layers, 0) where there is none
    key_norm: Floats
    out: Pairs
    mlp_norm: Floats
    gate_up: Pairs  # blocks of gate and up by turns
    down: Pairs
    final_norm: Floats  # (hidden,)
    head: Pairs
    head_bias: Floats  # (vocab_size,) in whole groups
    windows: NDArray[np.int64]  # (num_layers,), 0 where a layer sees all


class Sizes(NamedTuple):
    """What the arrays do not say."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of attention scores
    epsilon: float  # of norms


class Room(NamedTuple):
    """Where a pass puts what it computes; rows in whole multiples of `products.MAX_ROWS`, sixteen bits as uint16."""

    hidden: Floats  # (rows, hidden)
    normed: NDArray[np.uint16]  # (rows, hidden)
    qkv: Floats  # (rows, queries, keys and values, in whole groups)
    queries: NDArray[np.uint16]  # (rows, num_heads * head_dim)
    attended: NDArray[np.uint16]
    gate_up: Floats  # (rows, 2 * intermediate)
    gated: NDArray[np.uint16]  # (rows, intermediate)


@compiled
def _wide(bits):  # type: ignore[no-untyped-def]
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@compiled
def _embed(token, embeddings, hidden):  # type: ignore[no-untyped-def]
    """A token's row of a matrix that is laid out for products."""
    num_pairs = len(hidden) // 2
    begin = token // LANES * num_pairs * LANES + token % LANES
    for pair in range(num_pairs):
        both = np.uint32(embeddings[begin + pair * LANES])
        hidden[2 * pair] = _wide(both & np.uint32(0xFFFF))
        hidden[2 * pair + 1] = _wide(both >> np.uint32(16))


@compiled
def _normalise(hidden, weight, epsilon, out):  # type: ignore[no-untyped-def]
    """RMS norm of one row (arXiv 1910.07467), as the bits of bfloat16."""
    total = np.float32(0)
    for i in range(len(hidden)):
        total += hidden[i] * hidden[i]
    factor = np.float32(1) / np.sqrt(total / np.float32(len(hidden)) + epsilon)
    for i in range(len(hidden)):
        out[i] = rounded(hidden[i] * factor * weight[i])


@compiled
def _rotate(head, norm, epsilon, cos, sin, out):  # type: ignore[no-untyped-def]
    """A query's or key's own norm, where there is one, then its position (arXiv 2104.09864), as bits of bfloat16."""
    half = len(head) // 2
    if len(norm):
        total = np.float32(0)
        for d in range(len(head)):
            total += head[d] * head[d]
        factor = np.float32(1) / np.sqrt(total / np.float32(len(head)) + epsilon)
        for d in range(len(head)):
            head[d] *= factor * norm[d]
    for d in range(half):
        out[d] = rounded(head[d] * cos[d] - head[d + half] * sin[d])
    for d in range(half):
        out[d + half] = rounded(head[d + half] * cos[d + half] + head[d] * sin[d + half])


@compiled
def _place(layer, weights, sizes, room, spans, cos, sin):  # type: ignore[no-untyped-def]
    """Turns queries and keys to their positions, and puts keys and values into the slots."""
    num_heads, num_kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    query_norm, key_norm = weights.query_norm[layer], weights.key_norm[layer]
    epsilon = np.float32(sizes.epsilon)
    for piece in range(len(spans.slots)):
        slot = spans.slots[piece]
        keys = layer_rows(slot[0], _BITS, layer, slot[2], num_kv_heads, head_dim)
        values = layer_rows(slot[1], _BITS, layer, slot[2], num_kv_heads, head_dim)
        for row in range(spans.ranges[piece, 0], spans.ranges[piece, 1]):
            qkv, stored = room.qkv[row], spans.rows[row]
            for head in range(num_heads):
                begin, end = head * head_dim, (head + 1) * head_dim
                _rotate(qkv[begin:end], query_norm, epsilon, cos[row], sin[row], room.queries[row, begin:end])
            for head in range(num_kv_heads):
                begin = (num_heads + head) * head_dim
                key = qkv[begin : begin + head_dim]
                _rotate(key, key_norm, epsilon, cos[row], sin[row], keys[stored, head])
                begin += num_kv_heads * head_dim
                for d in range(head_dim):
                    values[stored, head, d] = rounded(qkv[begin + d])


@compiled
def run_step(num_threads, tokens, cos, sin, logit_rows, weights, sizes, room, spans, logits):  # type: ignore[no-untyped-def]
    """Logits (rows, vocab_size in whole groups) float32 of a batch; cos, sin (rows, head_dim) float32.

    Keys and values of all rows are put into their slots.
    """
    num_rows, epsilon = len(tokens), np.float32(sizes.epsilon)
    hidden_pairs = room.hidden.shape[1] // 2
    layer_qkv = len(weights.qkv) // len(weights.windows)
    layer_out = len(weights.out) // len(weights.windows)
    layer_gate_up = len(weights.gate_up) // len(weights.windows)
    layer_down = len(weights.down) // len(weights.windows)
    for row in range(num_rows):
        _embed(tokens[row], weights.embeddings, room.hidden[row])
    for layer in range(len(weights.windows)):
        for row in range(num_rows):
            _normalise(room.hidden[row], weights.attention_norm[layer], epsilon, room.normed[row])
        bias = weights.qkv_bias[layer]
        project(num_threads, room.normed, num_rows, weights.qkv, layer * layer_qkv, hidden_pairs, bias, room.qkv)
        _place(layer, weights, sizes, room, spans, cos, sin)
        scale, window = np.float32(sizes.scale), weights.windows[layer]
        attend(room.queries, spans, layer, sizes.num_heads, sizes.num_kv_heads, scale, window, room.attended)
        out_pairs = room.attended.shape[1] // 2
        project_onto(num_threads, room.attended, num_rows, weights.out, layer * layer_out, out_pairs, room.hidden)
        for row in range(num_rows):
            _normalise(room.hidden[row], weights.mlp_norm[layer], epsilon, room.normed[row])
        begin, both = layer * layer_gate_up, room.gate_up
        project_gated(num_threads, room.normed, num_rows, weights.gate_up, begin, hidden_pairs, both, room.gated)
        down_pairs = room.gated.shape[1] // 2
        project_onto(num_threads, room.gated, num_rows, weights.down, layer * layer_down, down_pairs, room.hidden)
    for i in range(len(logit_rows)):
        _normalise(room.hidden[logit_rows[i]], weights.final_norm, epsilon, room.normed[i])
    project(num_threads, room.normed, len(logit_rows), weights.head, 0, hidden_pairs, weights.head_bias, logits)
