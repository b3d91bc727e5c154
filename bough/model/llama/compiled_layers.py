"""Llama-like layers on a CPU, each compiled as a whole; equal to transformers' modules up to rounding.

The residual stream stays in float32 through all layers, and a batch stays in place between them. Each row's products
are those of a single row, so that its result is the same bit for bit in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from bough.model.batch.batch import Batch
from bough.model.cpu.jit import pointer
from bough.model.cpu.linear import numbers
from bough.model.cpu.llvm_vectors import LANES
from bough.model.cpu.work_stealing import counters
from bough.model.llama.layer import LOOPS, LayerWeights, Pass, run_layer, share_layer
from bough.model.llama.rows import Floats, collect, spread
from bough.model.llama.weights import Matrices, Vectors, Workspace, num_blocks, sizes_of, window, word_rows
from bough.model.loading.loading import Skeleton


class _ChunkState(NamedTuple):
    """The state of a chunk between layers."""

    hidden: Floats  # (blocks, hidden, LANES)
    cos: Floats  # (rows, head_dim)
    sin: Floats


class CompiledLayers:
    """Runs a batch through the layers in order, as their weights arrive."""

    def __init__(self, skeleton: Skeleton) -> None:
        """`skeleton` must be of a model for which `bough.model.llama.weights.supports_fused_layers` holds."""
        self._layers: Sequence[Any] = skeleton.layers
        self._architecture = skeleton.config.model_type
        self._sizes, self._workspace = sizes_of(skeleton), Workspace(skeleton, word_rows)
        self._vectors: dict[int, Vectors] = {}
        self._weights: dict[tuple[int, int], LayerWeights] = {}
        self._states: list[_ChunkState] = []
        self._share: Any = None  # pointer to `share_layer`, compiled for the types of these arrays

    def run(
        self,
        index: int,
        place: tuple[int, int] | None,
        hidden: torch.Tensor,
        batch: Batch,
        rotary: tuple[torch.Tensor, torch.Tensor],
        is_last: bool,
    ) -> torch.Tensor:
        """Run a layer with bound parameters on rows of shape (1, num_rows, hidden).

        The first layer reads `hidden` and the `rotary` tables (1, num_rows, head_dim); the last one returns the result,
        others return `hidden` unchanged. `place` is the key by which pointers to the parameters are cached, or None.
        """
        if index == 0:
            self._begin(hidden, batch, rotary)
        weights, num_threads = self._weights_of(index, place), numba.get_num_threads()
        for chunk, state in zip(batch.chunks, self._states, strict=True):
            workspace = self._workspace.of(len(state.hidden))._replace(hidden=state.hidden)
            spans, number = chunk.spans(index)
            rows = Pass(chunk.num_tokens, self._sizes, workspace, spans, state.cos, state.sin)
            taken = counters(num_threads, LOOPS)
            if self._share is None:
                self._share = pointer(share_layer, taken, 0, num_threads, number, weights, rows)
            run_layer(self._share, taken, num_threads, number, weights, *rows)
        return self._end(hidden, batch) if is_last else hidden

    def _begin(self, hidden: torch.Tensor, batch: Batch, rotary: tuple[torch.Tensor, torch.Tensor]) -> None:
        cos, sin = (table[0].float().numpy() for table in rotary)
        rows, self._states = numbers(hidden[0]), []
        for chunk in batch.chunks:
            own = slice(chunk.begin, chunk.end)
            blocks = np.empty((num_blocks(chunk.end - chunk.begin), rows.shape[1], LANES), np.float32)
            spread(rows[own], blocks)
            self._states.append(_ChunkState(blocks, cos[own], sin[own]))

    def _end(self, like: torch.Tensor, batch: Batch) -> torch.Tensor:
        out = torch.empty_like(like)
        rows = numbers(out[0])
        for chunk, state in zip(batch.chunks, self._states, strict=True):
            collect(state.hidden, rows[chunk.begin : chunk.end])
        self._states = []
        return out

    def _weights_of(self, index: int, place: tuple[int, int] | None) -> LayerWeights:
        if place in self._weights:
            return self._weights[place]
        layer = self._layers[index]
        vectors = self._vectors.get(index) or Vectors.of(layer)
        self._vectors[index] = vectors
        matrices, own_window = map(numbers, Matrices.of(layer)), window(layer, self._architecture)
        weights = LayerWeights._make((*vectors, *matrices, own_window))
        if place is not None:
            self._weights[place] = weights
        return weights
