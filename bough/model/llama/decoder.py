"""Llama-like models on a CPU: a decoder for few rows at a time, as in a draft step, and a target's layers one by one.

The result equals transformers' in bfloat16 up to rounding: the residual stream stays in float32 through all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bough.model.batch.batch import Batch
from bough.model.cpu.gemm_parallel import share_product
from bough.model.cpu.jit import fastmath_inner, fastmath_parallel, pointer
from bough.model.cpu.linear import numbers
from bough.model.cpu.llvm_vectors import LANES
from bough.model.cpu.operands import MOST, ZERO
from bough.model.cpu.work_stealing import as_thread, counters
from bough.model.llama.layer import LOOPS, LayerWeights, Pass, run_layer, share_layer
from bough.model.llama.rows import Floats, collect, share_norms, spread
from bough.model.llama.weights import (
    Matrices,
    Vectors,
    Workspace,
    biases,
    code_rows,
    floats,
    num_blocks,
    sizes_of,
    window,
    word_rows,
)
from bough.model.loading.loading import ParameterSlot, Skeleton, bind_resident
from bough.runtime.host_memory import large_pages

POSITIONS_STEP = 1024  # rotary tables grow in steps of this many positions
CPU = torch.device("cpu")


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


class Stack:
    """Stores matrices in bfloat16, as in the checkpoint."""

    def __init__(self, count: int) -> None:
        self._count, self._used = count, 0
        self.matrices: NDArray[Any] = np.zeros(0, np.uint16)  # (count, ...) as `laid_out` makes them

    def put(self, matrix: torch.Tensor) -> None:
        """Add the next matrix; all have the same shape."""
        own = self.laid_out(matrix.detach())
        if not self._used:
            memory = np.frombuffer(large_pages(self._count * own.nbytes), own.dtype)
            self.matrices = memory.reshape(self._count, *own.shape)
        self.matrices[self._used] = own
        self._used += 1

    @staticmethod
    def laid_out(matrix: torch.Tensor) -> NDArray[Any]:
        """The numbers of a matrix, (outputs, inputs) uint16, in the form that products read."""
        return numbers(matrix)

    def weights_of(self, outputs: NDArray[np.int32]) -> NDArray[np.float32]:
        """The weights (num_outputs, inputs) of some outputs of the first matrix."""
        weights: NDArray[np.float32] = (self.matrices[0][outputs].astype(np.uint32) << np.uint32(16)).view(np.float32)
        return weights


class Int8Stack(Stack):
    """Stores matrices in 8 bits (`bough.model.cpu.operands`) with a scale for each output: half the bytes to read."""

    @staticmethod
    def laid_out(matrix: torch.Tensor) -> NDArray[Any]:
        """(groups, words, LANES) int32; inputs are whole words, and outputs are padded to whole groups."""
        whole = nn.functional.pad(matrix.float(), (0, 0, 0, -len(matrix) % LANES))
        scales = whole.abs().amax(1) / MOST
        codes = (whole / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().clamp(-MOST, MOST) + ZERO
        words = codes.to(torch.uint8).numpy().view(np.int32).reshape(-1, LANES, whole.shape[1] // 4)
        of_outputs = scales.numpy().view(np.int32).reshape(-1, 1, LANES)
        return np.concatenate((words.transpose(0, 2, 1), of_outputs), axis=1)

    def weights_of(self, outputs: NDArray[np.int32]) -> NDArray[np.float32]:
        words = self.matrices[0][outputs // LANES, :, outputs % LANES]
        codes, scales = (np.ascontiguousarray(part) for part in (words[:, :-1], words[:, -1:]))
        weights: NDArray[np.float32] = (codes.view(np.uint8).astype(np.float32) - ZERO) * scales.view(np.float32)
        return weights


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
        # Uses numpy instead of torch if possible: caches are cold after each step, and every call is slow.
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
    """The embeddings and all other weights; loaded layer by layer: at most one layer is in memory twice."""
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
    """Write rows to hidden (blocks, hidden, LANES); lanes beyond the last become 0, to keep their values small."""
    whole = np.zeros((len(hidden) * LANES, rows.shape[1]), np.float32)
    whole[: len(rows)] = rows
    hidden[:] = whole.reshape(len(hidden), LANES, -1).transpose(0, 2, 1)


def _take_out(hidden: NDArray[np.float32], rows: NDArray[np.float32]) -> None:
    """The reverse of `_lay_out`."""
    rows[:] = hidden.transpose(0, 2, 1).reshape(-1, hidden.shape[1])[: len(rows)]


def _release(slots: Sequence[ParameterSlot]) -> None:
    for slot in slots:
        slot.module._parameters[slot.key] = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)


class _ChunkState(NamedTuple):
    """The state of a chunk between layers."""

    hidden: Floats  # (blocks, hidden, LANES)
    cos: Floats  # (rows, head_dim)
    sin: Floats


class CompiledLayers:
    """Runs a batch through the layers in order, as their weights arrive, each compiled as a whole.

    A batch stays in place between layers. Each row's products are those of a single row, so its result is the same
    bit for bit in any batch.
    """

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
        end_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        """Run a layer with bound parameters on rows of shape (1, num_rows, hidden).

        The first layer reads `hidden`, in bfloat16 or float32, and the `rotary` tables (1, num_rows, head_dim). The
        last one has an `end_dtype`, in which it returns the result: float32 is exact, for further layers elsewhere.
        Others return `hidden` unchanged. `place` is the key by which pointers to the parameters are cached, or None.
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
        return hidden if end_dtype is None else self._end(hidden.shape, batch, end_dtype)

    def _begin(self, hidden: torch.Tensor, batch: Batch, rotary: tuple[torch.Tensor, torch.Tensor]) -> None:
        cos, sin = (table[0].float().numpy() for table in rotary)
        is_exact = hidden.dtype == torch.float32
        rows, self._states = hidden[0].numpy() if is_exact else numbers(hidden[0]), []
        for chunk in batch.chunks:
            own = slice(chunk.begin, chunk.end)
            blocks = np.empty((num_blocks(chunk.end - chunk.begin), rows.shape[1], LANES), np.float32)
            (_lay_out if is_exact else spread)(rows[own], blocks)
            self._states.append(_ChunkState(blocks, cos[own], sin[own]))

    def _end(self, shape: torch.Size, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype)
        is_exact = dtype == torch.float32
        rows = out[0].numpy() if is_exact else numbers(out[0])
        for chunk, state in zip(batch.chunks, self._states, strict=True):
            (_take_out if is_exact else collect)(state.hidden, rows[chunk.begin : chunk.end])
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
