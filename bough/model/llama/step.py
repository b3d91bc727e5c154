"""One pass of a Llama-like decoder over few rows, compiled as a whole, without calls to Python or torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from bough.model.cpu.gemm_parallel import share_product
from bough.model.cpu.jit import fastmath_inner, fastmath_parallel
from bough.model.cpu.llvm_vectors import LANES
from bough.model.cpu.work_stealing import as_thread
from bough.model.llama.layer import LOOPS, LayerWeights, Pass, share_layer
from bough.model.llama.rows import Floats, share_norms


class Weights(NamedTuple):
    """Weights of a model."""

    layers: LayerWeights
    final_norm: Floats  # (hidden,)
    head: Any
    head_bias: Floats  # (vocab_size,)


@fastmath_inner
def _layer_of(layers: Any, layer: Any) -> Any:
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


@fastmath_inner
def share_layers(taken: Any, thread: Any, num_threads: Any, layers: Any, rows: Any) -> Any:
    """A thread's share of all layers."""
    for layer in range(len(layers.window)):
        counts = taken[layer * LOOPS : (layer + 1) * LOOPS]
        share_layer(counts, thread, num_threads, layer, _layer_of(layers, layer), rows)


@fastmath_inner
def share_head(
    taken: Any,
    thread: Any,
    num_threads: Any,
    wanted: Any,
    num_rows: Any,
    norm: Any,
    epsilon: Any,
    normed: Any,
    head: Any,
    bias: Any,
    logits: Any,
) -> Any:
    """A thread's share of the logits; its loops use the last two counters."""
    share_norms(taken[-2], thread, num_threads, wanted, norm, epsilon, normed)
    share_product(taken[-1], thread, num_threads, normed, num_rows, head, bias, logits)


@fastmath_parallel
def run_step(
    layers_share: Any,
    head_share: Any,
    taken: Any,
    num_threads: Any,
    logit_rows: Any,
    layers: Any,
    norm: Any,
    head: Any,
    bias: Any,
    num_rows: Any,
    sizes: Any,
    workspace: Any,
    spans: Any,
    cos: Any,
    sin: Any,
    logits: Any,
) -> Any:
    """Compute logits (logit rows in whole blocks, vocab_size) float32 of a `Pass`, which is given by its fields.

    `layers_share` and `head_share` are pointers to `share_layers` and `share_head` (`bough.model.cpu.jit.pointer`).
    Keys and values of all rows are written to their slots. `workspace` has exactly the blocks of the rows; `taken` has
    counters of num_layers * LOOPS + 2 loops (`bough.model.cpu.work_stealing.counters`).
    """
    for number in numba.prange(num_threads):
        thread = as_thread(number)
        rows = Pass(num_rows, sizes, workspace, spans, cos, sin)
        layers_share(taken, thread, num_threads, layers, rows)
    if len(logit_rows) == 0:
        return
    wanted = np.zeros((len(logits) // LANES, workspace.hidden.shape[1], LANES), np.float32)
    for i in range(len(logit_rows)):
        wanted[i // LANES, :, i % LANES] = workspace.hidden[logit_rows[i] // LANES, :, logit_rows[i] % LANES]
    normed, epsilon = workspace.normed[: len(wanted)], np.float32(sizes.epsilon)
    for number in numba.prange(num_threads):
        thread = as_thread(number)
        head_share(taken, thread, num_threads, wanted, len(logit_rows), norm, epsilon, normed, head, bias, logits)
