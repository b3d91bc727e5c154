"""Llama-like decoders on a CPU, for a few rows at a time: the path of a draft step.

What it computes is what transformers computes, in bfloat16, but for rounding: the residual stream stays in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import nn

from bough.model.batch import Batch
from bough.model.lean_step import LOOPS, Room, Sizes, Weights, run_step
from bough.model.loading import Correction, ParameterSlot, Skeleton, bind_resident, uncorrected
from bough.model.pages import large_pages
from bough.model.row_products import numbers
from bough.model.shares import counters
from bough.model.tiles import GROUP
from bough.model.vectors import LANES

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")  # of one build; any other goes by way of transformers
POSITIONS_STEP = 1024  # rotary tables grow by so many rows
CPU = torch.device("cpu")


def is_lean(skeleton: Skeleton, device: torch.device) -> bool:
    """Whether a model can be run in this way."""
    config = skeleton.config
    layer: Any = skeleton.layers[0]  # of a class of transformers' own; no type knows its attributes
    return (
        device.type == "cpu"
        and skeleton.dtype == torch.bfloat16
        and config.model_type in ARCHITECTURES
        and config.hidden_act == "silu"
        and layer.self_attn.o_proj.bias is None
        and layer.mlp.down_proj.bias is None
        and config.hidden_size % GROUP == config.intermediate_size % GROUP == skeleton.kv_shape().head_dim % 2 == 0
    )


class LeanDecoder:
    """A model whose weights stand in a few arrays, as compiled code reads them; it keeps no other copy of them."""

    def __init__(self, skeleton: Skeleton, correct: Correction = uncorrected) -> None:
        """Loads the weights, layer by layer; `correct` may change a layer's before they are put there."""
        config, kv = skeleton.config, skeleton.kv_shape()
        first: Any = skeleton.layers[0]
        self._rotary = skeleton.model.get_decoder().rotary_emb
        self._vocab_size = skeleton.vocab_size
        self._sizes = Sizes(
            int(config.num_attention_heads),
            kv.num_kv_heads,
            kv.head_dim,
            float(first.self_attn.scaling),
            config.rms_norm_eps,
        )
        self._hidden, self._intermediate = int(config.hidden_size), int(config.intermediate_size)
        self._weights = _load(skeleton, correct)
        self._cos = self._sin = np.zeros((0, kv.head_dim), np.float32)
        self._room = self._new_room(1)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> torch.Tensor:
        """(num_logit_rows, vocab_size) float32 for the rows of `batch` that want them; made with `rows=None`."""
        (chunk,) = batch.chunks
        positions = batch.position_ids[0].numpy()
        self._know_positions(int(positions.max()) + 1)
        num_logits = len(batch.logit_rows)
        logits = torch.empty((_blocks(num_logits) * LANES, len(self._weights.head_bias)))
        num_threads = numba.get_num_threads()
        run_step(
            counters(num_threads, len(self._weights.windows) * LOOPS + 1),
            num_threads,
            batch.input_ids[0].numpy(),
            self._cos[positions],
            self._sin[positions],
            batch.logit_rows.numpy(),
            self._weights,
            self._sizes,
            self._room_of(_blocks(batch.num_rows)),
            chunk.spans(0)[0],
            logits.numpy(),
        )
        return logits[:num_logits, : self._vocab_size]

    def _room_of(self, num_blocks: int) -> Room:
        """As many blocks as a batch fills, of the most that one has filled yet."""
        most = len(self._room.hidden)
        if num_blocks > most:
            self._room, most = self._new_room(num_blocks), num_blocks
        return Room._make(array[: len(array) // most * num_blocks] for array in self._room)

    def _new_room(self, blocks: int) -> Room:
        rows, attended = blocks * LANES, self._sizes.num_heads * self._sizes.head_dim
        qkv = attended + 2 * self._sizes.num_kv_heads * self._sizes.head_dim
        queries, heads = (np.zeros((rows, attended), np.uint16) for _ in range(2))
        return Room(
            np.zeros((blocks, self._hidden, LANES), np.float32),
            np.zeros((blocks, self._hidden // 2, LANES), np.int32),
            np.zeros((rows, qkv), np.float32),
            queries,
            queries.view(np.int32),
            heads,
            heads.view(np.int32),
            np.zeros((blocks, attended // 2, LANES), np.int32),
            np.zeros((blocks, self._intermediate, LANES), np.float32),
            np.zeros((blocks, self._intermediate, LANES), np.float32),
            np.zeros((blocks, self._intermediate // 2, LANES), np.int32),
        )

    def _know_positions(self, num_positions: int) -> None:
        if num_positions > len(self._cos):
            count = -(-num_positions // POSITIONS_STEP) * POSITIONS_STEP
            cos, sin = self._rotary(torch.zeros(1, dtype=torch.bfloat16), torch.arange(count)[None])
            self._cos, self._sin = cos[0].float().numpy(), sin[0].float().numpy()


def _load(skeleton: Skeleton, correct: Correction) -> Weights:
    """Layer by layer, so that no more than one layer is there twice."""
    bind_resident(skeleton.resident_slots, skeleton.dtype, CPU)
    decoder, head = skeleton.model.get_decoder(), skeleton.model.get_output_embeddings()
    embeddings = _Stack(1)
    embeddings.put(decoder.embed_tokens.weight)
    output = embeddings if head.weight is decoder.embed_tokens.weight else _Stack(1)
    if output is not embeddings:
        output.put(head.weight)
    final_norm = _floats(decoder.norm.weight)
    head_bias = _biases(head)
    _release(skeleton.resident_slots)
    matrices = [_Stack(len(skeleton.layers)) for _ in range(5)]
    vectors = []
    for index, (layer, slots) in enumerate(zip(skeleton.layers, skeleton.layer_slots, strict=True)):
        bind_resident(slots, skeleton.dtype, CPU)
        correct(index, layer)
        for stack, matrix in zip(matrices, _matrices(layer), strict=True):
            stack.put(matrix)
        vectors.append(_vectors(layer))
        _release(slots)
    attention_norm, qkv_bias, query_norm, key_norm, mlp_norm = (np.stack(kind) for kind in zip(*vectors, strict=True))
    qkv, out, gate, up, down = (stack.numbers for stack in matrices)
    windows = np.array([_window(layer, skeleton.config.model_type) for layer in skeleton.layers], np.int64)
    return Weights(
        embeddings.numbers[0],
        attention_norm,
        qkv,
        qkv_bias,
        query_norm,
        key_norm,
        out,
        mlp_norm,
        gate,
        up,
        down,
        final_norm,
        output.numbers[0],
        head_bias,
        windows,
    )


class _Stack:
    """One matrix after another."""

    def __init__(self, count: int) -> None:
        self._count, self._used = count, 0
        self.numbers = np.zeros((0, 0, 0), np.uint16)  # (count, outputs, inputs)

    def put(self, matrix: torch.Tensor) -> None:
        """All are of one shape."""
        if not len(self.numbers):
            memory = np.frombuffer(large_pages(self._count * matrix.nbytes), np.uint16)
            self.numbers = memory.reshape(self._count, *matrix.shape)
        self.numbers[self._used] = numbers(matrix.detach())
        self._used += 1


def _matrices(layer: Any) -> tuple[torch.Tensor, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
    return qkv, attention.o_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight


def _vectors(layer: Any) -> tuple[np.ndarray, ...]:
    """Norm before attention, biases of queries, keys and values, norms of queries and keys, norm before the MLP."""
    attention = layer.self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (np.zeros(0, np.float32) if norm is None else _floats(norm.weight) for norm in norms)
    return (
        _floats(layer.input_layernorm.weight),
        _biases(*projections),
        query_norm,
        key_norm,
        _floats(layer.post_attention_layernorm.weight),
    )


def _biases(*projections: Any) -> np.ndarray:
    """Of linear layers one after another, 0 where there are none."""
    return _floats(torch.cat([p.weight.new_zeros(p.out_features) if p.bias is None else p.bias for p in projections]))


def _blocks(num_rows: int) -> int:
    return -(-num_rows // LANES)


def _floats(values: torch.Tensor) -> np.ndarray:
    return values.detach().float().numpy().copy()


def _release(slots: Sequence[ParameterSlot]) -> None:
    for slot in slots:
        slot.module._parameters[slot.key] = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)


def _window(layer: Any, architecture: str) -> int:
    """How far back a layer sees, 0 for all: Mistral says so for all layers together, Qwen for each."""
    attention = layer.self_attn
    holder = attention.config if architecture == "mistral" else attention
    return int(getattr(holder, "sliding_window", None) or 0)
