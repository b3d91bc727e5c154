"""One layer of a Llama-like decoder over some rows, compiled whole: no call of Python or torch between its parts.

What becomes of a row depends on the row alone, bit for bit, wherever it stands and whatever is beside it; but for few
rows, which have products of their own, where a caller allows it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from bough.model.attention_cpu import attend
from bough.model.few_rows import MOST, are_few, few_of
from bough.model.lean_rows import Bits, Floats, Words, compiled, gate_words, lay_out_rows, normalise, parallel, rotate
from bough.model.numbers import rounded
from bough.model.project import multiply, next_groups, num_groups_of, project
from bough.model.spans import layer_rows
from bough.model.tiles import GROUP

LOOPS = 5  # of a layer, of pieces that threads take
_BITS = np.uint16(0)


class LayerWeights(NamedTuple):
    """Of a layer; or of all layers, each array with one axis more in front."""

    attention_norm: Floats  # (hidden,)
    bias: Floats  # of queries, keys and values
    query_norm: Floats  # (head_dim,), or (0,) where there is none
    key_norm: Floats
    mlp_norm: Floats  # (hidden,)
    queries: Bits  # matrices as a checkpoint has them, (outputs, inputs)
    keys: Bits
    values: Bits
    out: Bits
    gate: Bits
    up: Bits
    down: Bits
    window: Any  # int64: how far back it sees, 0 for all


class Sizes(NamedTuple):
    """What the arrays do not say."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of attention scores
    epsilon: float  # of norms


class Room(NamedTuple):
    """Where a pass puts what it computes, for some blocks of LANES rows."""

    hidden: Floats  # (blocks, hidden, LANES)
    normed: Words  # (blocks, hidden / 2, LANES)
    qkv: Floats  # (rows, queries, keys and values)
    queries: Bits  # (rows, num_heads * head_dim)
    query_words: Words  # the same, by twos
    attended: Bits  # (rows, num_heads * head_dim)
    attended_words: Words
    branch: Words  # (blocks, num_heads * head_dim / 2, LANES)
    gate: Floats  # (blocks, intermediate, LANES)
    up: Floats
    gated: Words  # (blocks, intermediate / 2, LANES)


@compiled
def _place_part(part, layer, weights, sizes, room, spans, cos, sin):  # type: ignore[no-untyped-def]
    num_heads, num_kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    query_norm, key_norm = weights.query_norm, weights.key_norm
    epsilon = np.float32(sizes.epsilon)
    piece, first_row, end_row = spans.parts[part]
    slot = spans.slots[piece]
    keys = layer_rows(slot[0], _BITS, layer, slot[2], num_kv_heads, head_dim)
    values = layer_rows(slot[1], _BITS, layer, slot[2], num_kv_heads, head_dim)
    for row in range(first_row, end_row):
        qkv, stored = room.qkv[row], spans.rows[row]
        for head in range(num_heads):
            begin, end = head * head_dim, (head + 1) * head_dim
            rotate(qkv[begin:end], query_norm, epsilon, cos[row], sin[row], room.queries[row, begin:end])
        for head in range(num_kv_heads):
            begin = (num_heads + head) * head_dim
            key = qkv[begin : begin + head_dim]
            rotate(key, key_norm, epsilon, cos[row], sin[row], keys[stored, head])
            begin += num_kv_heads * head_dim
            for d in range(head_dim):
                values[stored, head, d] = rounded(qkv[begin + d])


@parallel
def _place_parts(layer, weights, sizes, room, spans, cos, sin):  # type: ignore[no-untyped-def]
    for part in numba.prange(len(spans.parts)):
        _place_part(part, layer, weights, sizes, room, spans, cos, sin)


@compiled
def _place(is_few, layer, weights, sizes, room, spans, cos, sin):  # type: ignore[no-untyped-def]
    """Turns queries and keys to their positions, and puts keys and values into the slots."""
    if is_few:
        for part in range(len(spans.parts)):
            _place_part(part, layer, weights, sizes, room, spans, cos, sin)
    else:
        _place_parts(layer, weights, sizes, room, spans, cos, sin)


@parallel
def _gated_parts(taken, num_threads, words, gate_matrix, up_matrix, gate, up, gated):  # type: ignore[no-untyped-def]
    """One reading of both matrices by all threads."""
    num_groups = num_groups_of(gate_matrix)
    for thread in numba.prange(num_threads):
        begin, end = next_groups(taken, thread, num_threads, num_groups)
        while begin < end:
            gate[:, begin * GROUP : end * GROUP] = 0
            up[:, begin * GROUP : end * GROUP] = 0
            multiply(words, gate_matrix, begin, end, None, gate)
            multiply(words, up_matrix, begin, end, None, up)
            for block in range(len(gated)):
                gate_words(gate[block], up[block], begin * GROUP // 2, end * GROUP // 2, gated[block])
            begin, end = next_groups(taken, thread, num_threads, num_groups)


@compiled
def _project_gated(taken, num_threads, num_rows, words, gate_matrix, up_matrix, gate, up, gated):  # type: ignore[no-untyped-def]
    """gated = silu(rows times one matrix) * (rows times the other)."""
    if are_few(num_rows, words):
        _gated_parts(taken, num_threads, few_of(words, num_rows), gate_matrix, up_matrix, gate, up, gated)
    else:
        _gated_parts(taken, num_threads, words, gate_matrix, up_matrix, gate, up, gated)


@compiled
def project_rows(taken, num_threads, num_rows, words, matrix, bias, out):  # type: ignore[no-untyped-def]
    if are_few(num_rows, words):
        project(taken, num_threads, few_of(words, num_rows), matrix, bias, out)
    else:
        project(taken, num_threads, words, matrix, bias, out)


@parallel
def _project_heads(taken, num_threads, rows, weights, out):  # type: ignore[no-untyped-def]
    """Queries, keys and values side by side in `out` (rows, of all three), in one loop over three matrices."""
    num_queries, num_keys = len(weights.queries), len(weights.keys)
    groups = num_groups_of(weights.queries), num_groups_of(weights.keys), num_groups_of(weights.values)
    first_key, first_value = groups[0], groups[0] + groups[1]
    end_keys = num_queries + num_keys
    of_queries, of_keys, of_values = out[:, :num_queries], out[:, num_queries:end_keys], out[:, end_keys:]
    bias, end_groups = weights.bias, first_value + groups[2]
    for thread in numba.prange(num_threads):
        begin, end = next_groups(taken, thread, num_threads, end_groups)
        while begin < end:
            own_end = min(end, first_key)
            multiply(rows, weights.queries, begin, own_end, bias[:num_queries], of_queries)
            own_begin, own_end = max(begin, first_key) - first_key, min(end, first_value) - first_key
            multiply(rows, weights.keys, own_begin, own_end, bias[num_queries:end_keys], of_keys)
            own_begin, own_end = max(begin, first_value) - first_value, end - first_value
            multiply(rows, weights.values, own_begin, own_end, bias[end_keys:], of_values)
            begin, end = next_groups(taken, thread, num_threads, end_groups)


@compiled
def _project_qkv(taken, num_threads, num_rows, words, weights, out):  # type: ignore[no-untyped-def]
    if are_few(num_rows, words):
        _project_heads(taken, num_threads, few_of(words, num_rows), weights, out)
    else:
        _project_heads(taken, num_threads, words, weights, out)


@compiled
def run_layer(taken, num_threads, num_rows, layer, weights, sizes, room, spans, cos, sin):  # type: ignore[no-untyped-def]
    """Takes room.hidden through a layer, and puts keys and values of all rows into slots, as their number `layer`.

    Few rows, as `num_rows` has them, are computed otherwise: count whole blocks where that must not be.
    cos, sin (rows, head_dim) float32; `taken` counts in LOOPS loops (`bough.model.shares.counters`).
    """
    epsilon, no_sinks = np.float32(sizes.epsilon), np.full(sizes.num_heads, -np.inf, np.float32)
    rules, is_few = (np.float32(sizes.scale), weights.window, np.float32(0), no_sinks), num_rows <= MOST
    normalise(is_few, room.hidden, weights.attention_norm, epsilon, room.normed)
    _project_qkv(taken[0], num_threads, num_rows, room.normed, weights, room.qkv)
    _place(is_few, layer, weights, sizes, room, spans, cos, sin)
    attend(taken[4], num_threads, room.query_words, spans, _BITS, layer, sizes.num_kv_heads, *rules, room.attended)
    lay_out_rows(is_few, room.attended_words, room.branch)
    project_rows(taken[1], num_threads, num_rows, room.branch, weights.out, None, room.hidden)
    normalise(is_few, room.hidden, weights.mlp_norm, epsilon, room.normed)
    matrices, made = (weights.gate, weights.up), (room.gate, room.up, room.gated)
    _project_gated(taken[2], num_threads, num_rows, room.normed, *matrices, *made)
    project_rows(taken[3], num_threads, num_rows, room.gated, weights.down, None, room.hidden)
