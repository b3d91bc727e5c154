"""Llama-like decoders on a CPU for few rows at a time, as in a draft step.

The result equals transformers' in bfloat16 up to rounding: the residual stream stays in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bough.model.batch.batch import Batch
from bough.model.cpu.jit import pointer
from bough.model.cpu.llvm_vectors import LANES
from bough.model.cpu.work_stealing import counters
from bough.model.llama.layer import LOOPS, LayerWeights, Pass
from bough.model.llama.stacks import Int8Stack, Stack
from bough.model.llama.step import Weights, run_step, share_head, share_layers
from bough.model.llama.weights import Matrices, Vectors, biases, floats, sizes_of, window
from bough.model.llama.workspace import Workspace, code_rows, num_blocks, word_rows
from bough.model.loading.loading import ParameterSlot, Skeleton, bind_resident

POSITIONS_STEP = 1024  # rotary tables grow in steps of this many positions
CPU = torch.device("cpu")


class LlamaDecoder:
    """A model whose weights are a few arrays for compiled code, without another copy."""

    def __init__(self, skeleton: Skeleton, is_int8: bool = False) -> None:
        """Load the weights layer by layer; with `is_int8`, matrices are stored and multiplied in 8 bits."""
        self._rotary = skeleton.model.get_decoder().rotary_emb
        self._vocab_size = skeleton.vocab_size
        self._sizes = sizes_of(skeleton)
        self._embeddings, self._weights = _load(skeleton, Int8Stack if is_int8 else Stack)
        self._cos = self._sin = np.zeros((0, self._sizes.head_dim), np.float32)
        self._workspace = Workspace(skeleton, code_rows if is_int8 else word_rows)
        self._shares: tuple[Any, Any] | None = None  # pointers to `share_layers` and `share_head`
        self._logits = np.zeros((0, len(self._weights.head_bias)), np.float32)

    def logits(self, batch: Batch) -> torch.Tensor:
        """Logits (num_logit_rows, vocab_size) float32 of the rows of `batch` that want them; made with `rows=None`.

        Valid until the next call.
        """
        # Uses numpy instead of torch where possible: caches are cold after each step, and every call is slow.
        (chunk,) = batch.chunks
        positions, logit_rows = batch.positions, batch.wanted_rows
        self._know_positions(int(positions.max()) + 1)
        logits = self._logits_buffer(num_blocks(len(logit_rows)) * LANES)
        num_threads = numba.get_num_threads()
        taken = counters(num_threads, len(self._weights.layers.window) * LOOPS + 2)
        workspace, spans = self._workspace.of(num_blocks(batch.num_rows)), chunk.spans(0)[0]
        _lay_out(self._embeddings.weights_of(batch.tokens), workspace.hidden)
        rows = Pass(len(positions), self._sizes, workspace, spans, self._cos[positions], self._sin[positions])
        if self._shares is None:
            self._shares = self._pointers(taken, num_threads, rows, logits)
        run_step(*self._shares, taken, num_threads, logit_rows, *self._weights, *rows, logits)
        return torch.from_numpy(logits[: len(logit_rows), : self._vocab_size])

    def _pointers(self, taken: Any, num_threads: int, rows: Pass, logits: Any) -> tuple[Any, Any]:
        """Pointers to the functions that `run_step` calls, compiled for arrays like these."""
        weights, hidden, normed = self._weights, rows.workspace.hidden, rows.workspace.normed
        head = hidden, 1, weights.final_norm, np.float32(0), normed, weights.head, weights.head_bias, logits
        return (
            pointer(share_layers, taken, 0, num_threads, weights.layers, rows),
            pointer(share_head, taken, 0, num_threads, *head),
        )

    def _logits_buffer(self, num_rows: int) -> NDArray[np.float32]:
        if num_rows > len(self._logits):
            self._logits = np.empty((num_rows, self._logits.shape[1]), np.float32)
        return self._logits[:num_rows]

    @torch.inference_mode()
    def _know_positions(self, num_positions: int) -> None:
        if num_positions > len(self._cos):
            count = -(-num_positions // POSITIONS_STEP) * POSITIONS_STEP
            cos, sin = self._rotary(torch.zeros(1, dtype=torch.bfloat16), torch.arange(count)[None])
            self._cos, self._sin = cos[0].float().numpy(), sin[0].float().numpy()


def _load(skeleton: Skeleton, stack: type[Stack]) -> tuple[Stack, Weights]:
    """The embeddings, and what else; loaded layer by layer, so that at most one layer is in memory twice."""
    bind_resident(skeleton, skeleton.resident_slots, CPU)
    decoder, head = skeleton.model.get_decoder(), skeleton.model.get_output_embeddings()
    embeddings = stack(1)
    embeddings.put(decoder.embed_tokens.weight)
    output = embeddings if head.weight is decoder.embed_tokens.weight else stack(1)
    if output is not embeddings:
        output.put(head.weight)
    final_norm = floats(decoder.norm.weight)
    head_bias = biases(head)
    _release(skeleton.resident_slots)
    stacks, vectors, windows = Matrices(*(stack(len(skeleton.layers)) for _ in Matrices._fields)), [], []
    for layer, slots in zip(skeleton.layers, skeleton.layer_slots, strict=True):
        bind_resident(skeleton, slots, CPU)
        for own, matrix in zip(stacks, Matrices.of(layer), strict=True):
            own.put(matrix)
        vectors.append(Vectors.of(layer))
        windows.append(window(layer, skeleton.config.model_type))
        _release(slots)
    stacked = Vectors(*(np.stack(kind) for kind in zip(*vectors, strict=True)))
    layers = LayerWeights._make((*stacked, *(own.matrices for own in stacks), np.array(windows, np.int64)))
    unused = np.zeros(-len(head_bias) % LANES, np.float32)  # fills the last group of outputs in 8 bits
    head_bias = np.concatenate([head_bias, unused]) if stack is Int8Stack else head_bias
    return embeddings, Weights(layers, final_norm, output.matrices[0], head_bias)


def _lay_out(rows: NDArray[np.float32], hidden: NDArray[np.float32]) -> None:
    """Write rows to hidden (blocks, hidden, LANES); lanes beyond the last become 0, so that nothing grows there."""
    whole = np.zeros((len(hidden) * LANES, rows.shape[1]), np.float32)
    whole[: len(rows)] = rows
    hidden[:] = whole.reshape(len(hidden), LANES, -1).transpose(0, 2, 1)


def _release(slots: Sequence[ParameterSlot]) -> None:
    for slot in slots:
        slot.module._parameters[slot.key] = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)
