"""One pass of a Llama-like decoder over a few rows, compiled whole: no call of Python or torch between its layers.

Rows are the lanes of vectors in all that is not attention (see `bough.model.tiles`), sixteen in a block.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from bough.model.attention_cpu import attend
from bough.model.few_rows import are_few, few_of
from bough.model.numbers import exp_below_zero, rounded, widened
from bough.model.project import multiply, next_groups, num_groups_of, project
from bough.model.spans import layer_rows
from bough.model.tiles import GROUP, lay_out
from bough.model.vectors import LANES

Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]  # of bfloat16
Words = NDArray[np.int32]  # of two
LOOPS = 5  # of a layer, of pieces that threads take
_BITS = np.uint16(0)

FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
compiled = numba.njit(fastmath=FASTMATH, cache=True, error_model="numpy")
parallel = numba.njit(fastmath=FASTMATH, cache=True, error_model="numpy", parallel=True)


class Weights(NamedTuple):
    """Of all layers; matrices as a checkpoint has them, (outputs, inputs)."""

    embeddings: Bits
    attention_norm: Floats  # (num_layers, hidden)
    qkv: Bits  # (num_layers, queries, keys and values, hidden)
    qkv_bias: Floats
    query_norm: Floats  # (num_layers, head_dim), or (num_layers, 0) where there is none
    key_norm: Floats
    out: Bits
    mlp_norm: Floats
    gate: Bits
    up: Bits
    down: Bits
    final_norm: Floats  # (hidden,)
    head: Bits
    head_bias: Floats  # (vocab_size,)
    windows: NDArray[np.int64]  # (num_layers,), 0 where a layer sees all


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
def _word(low, high):  # type: ignore[no-untyped-def]
    return np.int32(np.uint32(rounded(low)) | np.uint32(rounded(high)) << np.uint32(16))


@compiled
def _embed(tokens, embeddings, hidden):  # type: ignore[no-untyped-def]
    """Lanes beyond the last token become 0, so that nothing piles up there."""
    for row in range(len(hidden) * LANES):
        here, lane = hidden[row // LANES], row % LANES
        if row >= len(tokens):
            here[:, lane] = 0
            continue
        embedding = embeddings[tokens[row]]
        for i in range(len(embedding)):
            here[i, lane] = widened(embedding[i])


@compiled
def _normalise_block(hidden, weight, epsilon, words):  # type: ignore[no-untyped-def]
    """RMS norm (arXiv 1910.07467) of a block."""
    factors = np.zeros(LANES, np.float32)
    for i in range(len(weight)):
        for lane in range(LANES):
            factors[lane] += hidden[i, lane] * hidden[i, lane]
    for lane in range(LANES):
        factors[lane] = np.float32(1) / np.sqrt(factors[lane] / np.float32(len(weight)) + epsilon)
    for word in range(len(words)):
        low, high = weight[2 * word], weight[2 * word + 1]
        for lane in range(LANES):
            factor = factors[lane]
            first, second = hidden[2 * word, lane] * factor * low, hidden[2 * word + 1, lane] * factor * high
            words[word, lane] = _word(first, second)


# What a single block or part wants is not worth a thread: each of these has a form for one.


@parallel
def _normalise_blocks(hidden, weight, epsilon, words):  # type: ignore[no-untyped-def]
    for block in numba.prange(len(hidden)):
        _normalise_block(hidden[block], weight, epsilon, words[block])


@compiled
def _normalise(hidden, weight, epsilon, words):  # type: ignore[no-untyped-def]
    if len(hidden) == 1:
        _normalise_block(hidden[0], weight, epsilon, words[0])
    else:
        _normalise_blocks(hidden, weight, epsilon, words)


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
def _place_part(part, layer, weights, sizes, room, spans, cos, sin):  # type: ignore[no-untyped-def]
    num_heads, num_kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    query_norm, key_norm = weights.query_norm[layer], weights.key_norm[layer]
    epsilon = np.float32(sizes.epsilon)
    piece, first_row, end_row = spans.parts[part]
    slot = spans.slots[piece]
    keys = layer_rows(slot[0], _BITS, layer, slot[2], num_kv_heads, head_dim)
    values = layer_rows(slot[1], _BITS, layer, slot[2], num_kv_heads, head_dim)
    for row in range(first_row, end_row):
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


@parallel
def _place_parts(layer, weights, sizes, room, spans, cos, sin):  # type: ignore[no-untyped-def]
    for part in numba.prange(len(spans.parts)):
        _place_part(part, layer, weights, sizes, room, spans, cos, sin)


@compiled
def _place(layer, weights, sizes, room, spans, cos, sin):  # type: ignore[no-untyped-def]
    """Turns queries and keys to their positions, and puts keys and values into the slots."""
    if len(spans.parts) == 1:
        _place_part(0, layer, weights, sizes, room, spans, cos, sin)
    else:
        _place_parts(layer, weights, sizes, room, spans, cos, sin)


@parallel
def _lay_out_blocks(words, blocks):  # type: ignore[no-untyped-def]
    for block in numba.prange(len(blocks)):
        lay_out(words, block, blocks)


@compiled
def _lay_out(words, blocks):  # type: ignore[no-untyped-def]
    if len(blocks) == 1:
        lay_out(words, 0, blocks)
    else:
        _lay_out_blocks(words, blocks)


@compiled
def _gate(gate, up, begin, end, gated):  # type: ignore[no-untyped-def]
    """gated = silu(gate) * up, for words [begin, end) of a block."""
    for word in range(begin, end):
        for lane in range(LANES):
            gated[word, lane] = _word(
                _silu(gate[2 * word, lane]) * up[2 * word, lane],
                _silu(gate[2 * word + 1, lane]) * up[2 * word + 1, lane],
            )


@compiled
def _silu(x):  # type: ignore[no-untyped-def]
    power = exp_below_zero(-abs(x))
    return x * (np.float32(1) if x > 0 else power) / (np.float32(1) + power)


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
                _gate(gate[block], up[block], begin * GROUP // 2, end * GROUP // 2, gated[block])
            begin, end = next_groups(taken, thread, num_threads, num_groups)


@compiled
def _project_gated(taken, num_threads, num_rows, words, gate_matrix, up_matrix, gate, up, gated):  # type: ignore[no-untyped-def]
    """gated = silu(rows times one matrix) * (rows times the other)."""
    if are_few(num_rows, words):
        _gated_parts(taken, num_threads, few_of(words, num_rows), gate_matrix, up_matrix, gate, up, gated)
    else:
        _gated_parts(taken, num_threads, words, gate_matrix, up_matrix, gate, up, gated)


@compiled
def _project(taken, num_threads, num_rows, words, matrix, bias, out):  # type: ignore[no-untyped-def]
    if are_few(num_rows, words):
        project(taken, num_threads, few_of(words, num_rows), matrix, bias, out)
    else:
        project(taken, num_threads, words, matrix, bias, out)


@compiled
def run_step(taken, num_threads, tokens, cos, sin, logit_rows, weights, sizes, room, spans, logits):  # type: ignore[no-untyped-def]
    """Logits (logit rows in whole blocks, vocab_size) float32 of a batch; cos, sin (rows, head_dim) float32.

    Keys and values of all rows are put into their slots. `room` has just the blocks that the rows fill; `taken` counts
    in num_layers * LOOPS + 1 loops (`bough.model.shares.counters`).
    """
    epsilon, scale = np.float32(sizes.epsilon), np.float32(sizes.scale)
    num_rows, no_sinks = len(tokens), np.full(sizes.num_heads, -np.inf, np.float32)
    _embed(tokens, weights.embeddings, room.hidden)
    for layer in range(len(weights.windows)):
        counts = taken[layer * LOOPS : (layer + 1) * LOOPS]
        _normalise(room.hidden, weights.attention_norm[layer], epsilon, room.normed)
        _project(counts[0], num_threads, num_rows, room.normed, weights.qkv[layer], weights.qkv_bias[layer], room.qkv)
        _place(layer, weights, sizes, room, spans, cos, sin)
        rules = scale, weights.windows[layer], np.float32(0), no_sinks
        attend(counts[4], num_threads, room.query_words, spans, _BITS, layer, sizes.num_kv_heads, *rules, room.attended)
        _lay_out(room.attended_words, room.branch)
        _project(counts[1], num_threads, num_rows, room.branch, weights.out[layer], None, room.hidden)
        _normalise(room.hidden, weights.mlp_norm[layer], epsilon, room.normed)
        gate, up, both = weights.gate[layer], weights.up[layer], counts[2]
        _project_gated(both, num_threads, num_rows, room.normed, gate, up, room.gate, room.up, room.gated)
        _project(counts[3], num_threads, num_rows, room.gated, weights.down[layer], None, room.hidden)
    if len(logit_rows) == 0:
        return
    _normalise(room.hidden, weights.final_norm, epsilon, room.normed)
    wanted = np.zeros((len(logits) // LANES, room.normed.shape[1], LANES), np.int32)
    for i in range(len(logit_rows)):
        wanted[i // LANES, :, i % LANES] = room.normed[logit_rows[i] // LANES, :, logit_rows[i] % LANES]
    _project(taken[-1], num_threads, len(logit_rows), wanted, weights.head, weights.head_bias, logits)
