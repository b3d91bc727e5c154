"""One pass of a Llama-like decoder over a few rows, compiled whole: no call of Python or torch between its layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bough.model.few_rows import MOST
from bough.model.lean_layer import LOOPS, LayerWeights, project_rows, run_layer
from bough.model.lean_rows import Bits, Floats, compiled, normalise
from bough.model.numbers import widened
from bough.model.vectors import LANES


class Weights(NamedTuple):
    """Of a whole model."""

    embeddings: Bits
    layers: LayerWeights
    final_norm: Floats  # (hidden,)
    head: Bits
    head_bias: Floats  # (vocab_size,)


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
def _layer_of(layers, layer):  # type: ignore[no-untyped-def]
    return LayerWeights(
        layers.attention_norm[layer],
        layers.bias[layer],
        layers.query_norm[layer],
        layers.key_norm[layer],
        layers.mlp_norm[layer],
        layers.queries[layer],
        layers.keys[layer],
        layers.values[layer],
        layers.out[layer],
        layers.gate[layer],
        layers.up[layer],
        layers.down[layer],
        layers.window[layer],
    )


@compiled
def run_step(taken, num_threads, tokens, cos, sin, logit_rows, weights, sizes, room, spans, logits):  # type: ignore[no-untyped-def]
    """Logits (logit rows in whole blocks, vocab_size) float32 of a batch; cos, sin (rows, head_dim) float32.

    Keys and values of all rows are put into their slots. `room` has just the blocks that the rows fill; `taken` counts
    in num_layers * LOOPS + 1 loops (`bough.model.shares.counters`).
    """
    num_rows = len(tokens)
    _embed(tokens, weights.embeddings, room.hidden)
    for layer in range(len(weights.layers.window)):
        counts = taken[layer * LOOPS : (layer + 1) * LOOPS]
        run_layer(counts, num_threads, num_rows, layer, _layer_of(weights.layers, layer), sizes, room, spans, cos, sin)
    if len(logit_rows) == 0:
        return
    normalise(num_rows <= MOST, room.hidden, weights.final_norm, np.float32(sizes.epsilon), room.normed)
    wanted = np.zeros((len(logits) // LANES, room.normed.shape[1], LANES), np.int32)
    for i in range(len(logit_rows)):
        wanted[i // LANES, :, i % LANES] = room.normed[logit_rows[i] // LANES, :, logit_rows[i] % LANES]
    project_rows(taken[-1], num_threads, len(logit_rows), wanted, weights.head, weights.head_bias, logits)
