"""One layer of a Llama-like decoder over some rows, compiled as a whole, without calls to Python or torch.

A row's result depends on the row alone, bit for bit, at any place in any batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from bough.model.batch.path_spans import PathSpans
from bough.model.cpu.attention_kernel import Rules, layer_rows, share_attention
from bough.model.cpu.gemm import GROUP
from bough.model.cpu.gemm_parallel import form_of, multiply, num_groups_of, num_pieces_of, parts_of, share_product
from bough.model.cpu.jit import fastmath_inner, fastmath_parallel
from bough.model.cpu.operands import LINE, num_outputs_of
from bough.model.cpu.work_stealing import as_thread, shared
from bough.model.llama.rows import Bits, Floats, gate_line, rotate, round_to, share_laying_out, share_norms

LOOPS = 9  # work-sharing loops of a layer
_BITS = np.uint16(0)


class LayerWeights(NamedTuple):
    """Weights of a layer; or of all layers, with one more axis in front."""

    attention_norm: Floats  # (hidden,)
    bias: Floats  # of queries, keys and values
    query_norm: Floats  # (head_dim,), or (0,) if there is none
    key_norm: Floats
    mlp_norm: Floats  # (hidden,)
    queries: Any  # matrices (outputs, inputs) in the form of `bough.model.cpu.operands`
    keys: Any
    values: Any
    out: Any
    gate: Any
    up: Any
    down: Any
    window: Any  # int64: length of the sliding window; 0 is unlimited


class Sizes(NamedTuple):
    """Model constants that cannot be derived from array shapes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of attention scores
    epsilon: float  # of norms


class LayerWorkspace(NamedTuple):
    """Buffers of a pass over some blocks of LANES rows. Rows of products are in the form of `operands`."""

    hidden: Floats  # (blocks, hidden, LANES)
    normed: Any  # rows of a product, as wide as the residual stream
    qkv: Floats  # (rows, queries + keys + values)
    queries: Bits  # (rows, num_heads * head_dim)
    attended: Floats  # (blocks, num_heads * head_dim, LANES)
    branch: Any  # rows of a product
    gate: Floats  # (blocks, intermediate, LANES)
    up: Floats
    gated: Any  # rows of a product


class Pass(NamedTuple):
    """Rows that go through the layers together."""

    num_rows: int
    sizes: Sizes
    workspace: LayerWorkspace
    spans: PathSpans
    cos: Floats  # (rows, head_dim)
    sin: Floats


@fastmath_inner
def _place(task: Any, layer: Any, weights: Any, rows: Any) -> Any:
    """Rotate the queries and keys of a KV head, and write its keys and values to the slots."""
    sizes, workspace, spans, cos, sin = rows.sizes, rows.workspace, rows.spans, rows.cos, rows.sin
    num_heads, num_kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    group, epsilon = num_heads // num_kv_heads, np.float32(sizes.epsilon)
    piece, first_row, end_row, kv_head = spans.tasks[task]
    slot = spans.slots[piece]
    keys = layer_rows(slot[0], _BITS, layer, slot[2], num_kv_heads, head_dim)
    values = layer_rows(slot[1], _BITS, layer, slot[2], num_kv_heads, head_dim)
    for row in range(first_row, end_row):
        qkv, stored = workspace.qkv[row], spans.rows[row]
        for head in range(kv_head * group, (kv_head + 1) * group):
            begin, end = head * head_dim, (head + 1) * head_dim
            rotate(qkv[begin:end], weights.query_norm, epsilon, cos[row], sin[row], workspace.queries[row, begin:end])
        begin = (num_heads + kv_head) * head_dim
        key = qkv[begin : begin + head_dim]
        rotate(key, weights.key_norm, epsilon, cos[row], sin[row], keys[stored, kv_head])
        begin += num_kv_heads * head_dim
        round_to(qkv[begin : begin + head_dim], values[stored, kv_head])


@fastmath_inner
def _share_placing(taken: Any, thread: Any, num_threads: Any, layer: Any, weights: Any, rows: Any) -> Any:
    num_tasks = len(rows.spans.tasks)
    for task in shared(taken, thread, num_threads, num_tasks):
        _place(task, layer, weights, rows)


@fastmath_inner
def _heads_piece(begin: Any, end: Any, weights: Any, rows: Any, few: Any, num_rows: Any, out: Any) -> Any:
    """Multiply groups [begin, end) of three matrices one after another."""
    queries, keys, values, bias = weights.queries, weights.keys, weights.values, weights.bias
    first_key, end_queries = num_groups_of(queries), num_outputs_of(queries)
    first_value, end_keys = first_key + num_groups_of(keys), end_queries + num_outputs_of(keys)
    of_queries, of_keys, of_values = out[:, :end_queries], out[:, end_queries:end_keys], out[:, end_keys:]
    multiply(rows, few, num_rows, queries, begin, min(end, first_key), bias[:end_queries], of_queries)
    own_begin, own_end = max(begin, first_key) - first_key, min(end, first_value) - first_key
    multiply(rows, few, num_rows, keys, own_begin, own_end, bias[end_queries:end_keys], of_keys)
    own_begin, own_end = max(begin, first_value) - first_value, end - first_value
    multiply(rows, few, num_rows, values, own_begin, own_end, bias[end_keys:], of_values)


@fastmath_inner
def _share_heads(taken: Any, thread: Any, num_threads: Any, weights: Any, rows: Any, num_rows: Any, out: Any) -> Any:
    """Compute queries, keys and values side by side in `out`, in one loop over three matrices."""
    num_groups = num_groups_of(weights.queries) + num_groups_of(weights.keys) + num_groups_of(weights.values)
    few, num_pieces = form_of(rows, num_rows), num_pieces_of(num_groups, num_threads)
    for piece in shared(taken, thread, num_threads, num_pieces):
        begin, end = parts_of(piece, num_pieces, num_groups)
        _heads_piece(begin, end, weights, rows, few, num_rows, out)


@fastmath_inner
def _gates_piece(
    begin: Any, end: Any, weights: Any, rows: Any, few: Any, num_rows: Any, gate: Any, up: Any, gated: Any
) -> Any:
    """Compute outputs [begin, end) of the gate and up matrices."""
    gate[:, begin:end] = 0
    up[:, begin:end] = 0
    multiply(rows, few, num_rows, weights.gate, begin // GROUP, end // GROUP, None, gate)
    multiply(rows, few, num_rows, weights.up, begin // GROUP, end // GROUP, None, up)
    for block in range(len(gate)):
        for line in range(begin, end, LINE):
            gate_line(gate[block], up[block], line, min(line + LINE, end), gated, block)


@fastmath_inner
def _share_gates(
    taken: Any, thread: Any, num_threads: Any, weights: Any, rows: Any, num_rows: Any, gate: Any, up: Any, gated: Any
) -> Any:
    """Compute gated = silu(rows @ gate) * (rows @ up) in whole lines."""
    num_lines = (gate.shape[1] + LINE - 1) // LINE
    few, num_pieces = form_of(rows, num_rows), num_pieces_of(num_lines, num_threads)
    for piece in shared(taken, thread, num_threads, num_pieces):
        begin, end = parts_of(piece, num_pieces, num_lines)
        _gates_piece(begin * LINE, min(end * LINE, gate.shape[1]), weights, rows, few, num_rows, gate, up, gated)


@fastmath_inner
def share_layer(taken: Any, thread: Any, num_threads: Any, layer: Any, weights: Any, rows: Any) -> Any:
    """A thread's share of `run_layer`; `taken` has the counters of LOOPS loops (`cpu.work_stealing.counters`)."""
    me, sizes, workspace, num_rows = (thread, num_threads), rows.sizes, rows.workspace, rows.num_rows
    epsilon, no_sinks = np.float32(sizes.epsilon), np.full(sizes.num_heads, -np.inf, np.float32)
    rules = Rules(sizes.num_kv_heads, np.float32(sizes.scale), weights.window, np.float32(0), no_sinks)
    share_norms(taken[0], *me, workspace.hidden, weights.attention_norm, epsilon, workspace.normed)
    _share_heads(taken[1], *me, weights, workspace.normed, num_rows, workspace.qkv)
    _share_placing(taken[2], *me, layer, weights, rows)
    share_attention(taken[3], *me, workspace.queries, rows.spans, _BITS, layer, rules, workspace.attended)
    share_laying_out(taken[4], *me, workspace.attended, workspace.branch)
    share_product(taken[5], *me, workspace.branch, num_rows, weights.out, None, workspace.hidden)
    share_norms(taken[6], *me, workspace.hidden, weights.mlp_norm, epsilon, workspace.normed)
    _share_gates(taken[7], *me, weights, workspace.normed, num_rows, workspace.gate, workspace.up, workspace.gated)
    share_product(taken[8], *me, workspace.gated, num_rows, weights.down, None, workspace.hidden)


@fastmath_parallel
def run_layer(
    share: Any,
    taken: Any,
    num_threads: Any,
    layer: Any,
    weights: Any,
    num_rows: Any,
    sizes: Any,
    workspace: Any,
    spans: Any,
    cos: Any,
    sin: Any,
) -> Any:
    """Run a layer on the hidden states of a `Pass`, and write its rows' keys and values to their slots.

    `layer` is the layer's number there; `share` is a pointer to `share_layer` (`bough.model.cpu.jit.pointer`); `taken`
    has counters of LOOPS loops (`bough.model.cpu.work_stealing.counters`). The `Pass` is given by its fields, as numba
    takes no tuples of tuples into a parallel loop.
    """
    for number in numba.prange(num_threads):
        rows = Pass(num_rows, sizes, workspace, spans, cos, sin)
        share(taken, as_thread(number), num_threads, layer, weights, rows)
