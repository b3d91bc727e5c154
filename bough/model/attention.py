"""Tree attention, in the place where transformers lets an attention function be registered.

Every row attends to the keys on its own path, in the order of their positions and in blocks fixed by position. So a
row's result depends on its query and its path alone, bit for bit: not on the tree around it, nor on what else is in the
batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from transformers import AttentionInterface

from bough.model.batch import Chunk, Piece

logger = logging.getLogger(__name__)

NAME = "bough"
NO_SINKS = np.zeros(0, np.float32)
BLOCK = 64  # keys that share one step of the running softmax

# Sums may be vectorised; whatever order the compiler chose is the order for every row and every call.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


_compiled = numba.njit(fastmath=_FASTMATH, cache=True, error_model="numpy")
_parallel = numba.njit(fastmath=_FASTMATH, cache=True, error_model="numpy", parallel=True)


# Arrays are passed whole and indexed inside: a slice would hide from the compiler that its last axis is contiguous.


@_compiled
def _score_block(queries, keys, row, kv_head, base, tail, begin, first, length, scale, scores):  # type: ignore[no-untyped-def]
    """Scores of one row's heads, (group, BLOCK), with the keys of one block; -inf where a key is not to be seen."""
    group, head_dim = scores.shape[0], queries.shape[2]
    for j in range(BLOCK):
        position = begin + j
        if first <= position < length:
            key_row = position if position < base else tail[row, position - base]
            for g in range(group):
                dot = np.float32(0)
                for d in range(head_dim):
                    dot += queries[row, kv_head * group + g, d] * keys[key_row, kv_head, d]
                scores[g, j] = dot * scale
        else:
            for g in range(group):
                scores[g, j] = -np.inf


@_compiled
def _fold_block(values, scores, row, kv_head, base, tail, begin, first, length, highest, total, result):  # type: ignore[no-untyped-def]
    """Folds a block into the running softmax of one row's heads.

    `highest` and `total` (group,), `result` their sums.
    """
    group, head_dim = result.shape
    for g in range(group):
        peak = highest[g]
        for j in range(BLOCK):
            peak = max(peak, scores[g, j])
        decay = np.exp(highest[g] - peak)
        highest[g] = peak
        block_total = np.float32(0)
        for j in range(BLOCK):
            weight = np.exp(scores[g, j] - peak)
            scores[g, j] = weight
            block_total += weight
        total[g] = total[g] * decay + block_total
        for d in range(head_dim):
            result[g, d] *= decay
    for j in range(max(first - begin, 0), min(BLOCK, length - begin)):
        position = begin + j
        value_row = position if position < base else tail[row, position - base]
        for g in range(group):
            weight = scores[g, j]
            for d in range(head_dim):
                result[g, d] += weight * values[value_row, kv_head, d]


@_compiled
def _cap(scores, softcap):  # type: ignore[no-untyped-def]
    """Soft-capping (Gemma 2), leaving -inf as it is."""
    for g in range(scores.shape[0]):
        for j in range(BLOCK):
            if scores[g, j] > -np.inf:
                scores[g, j] = softcap * np.tanh(scores[g, j] / softcap)


@_parallel
def _attend(queries, keys, values, base, tail, lengths, scale, window, softcap, sinks, out):  # type: ignore[no-untyped-def]
    """Running softmax over blocks of keys (arXiv 2205.14135), one row and one KV head at a time.

    queries, out (num_rows, num_heads, head_dim); keys, values (num_keys, num_kv_heads, head_dim), all float32;
    tail (num_rows, width), lengths (num_rows,) int32; window 0 and softcap 0 are off; sinks (num_heads,) are scores of
    keys without a value, empty where there are none.
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    for task in numba.prange(num_rows * num_kv_heads):
        row, kv_head = task % num_rows, task // num_rows
        length = lengths[row]
        first = max(0, length - window) if window > 0 else 0
        scores = np.empty((group, BLOCK), np.float32)
        highest = np.full(group, -np.inf, np.float32)
        total = np.zeros(group, np.float32)
        for g in range(group if len(sinks) else 0):
            highest[g], total[g] = sinks[kv_head * group + g], np.float32(1)
        result = np.zeros((group, head_dim), np.float32)
        for begin in range(first // BLOCK * BLOCK, length, BLOCK):
            _score_block(queries, keys, row, kv_head, base, tail, begin, first, length, scale, scores)
            if softcap > 0:
                _cap(scores, softcap)
            _fold_block(values, scores, row, kv_head, base, tail, begin, first, length, highest, total, result)
        for g in range(group):
            for d in range(head_dim):
                out[row, kv_head * group + g, d] = result[g, d] / total[g]


def attend_on_cpu(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    piece: Piece,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of a piece's rows on the CPU, float32 out; shapes as in `_attend`, any floating types in."""
    queries = queries.float().contiguous()
    out = torch.empty_like(queries)
    _attend(
        queries.numpy(),
        keys.float().numpy(),
        values.float().numpy(),
        piece.base,
        piece.tail,
        piece.lengths,
        np.float32(scale),
        window,
        np.float32(softcap),
        NO_SINKS if sinks is None else sinks.numpy(),
        out.numpy(),
    )
    return out


def attend_by_mask(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    piece: Piece,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same on any device, by gathering each row's path: right, but neither lean nor bitwise reproducible.

    The reference for the kernels, and what runs on a GPU where there is no Triton.
    """
    queries, keys, values = queries.float(), keys.float(), values.float()
    longest = int(piece.lengths.max())
    positions = np.arange(longest)
    tail_index = np.clip(positions - piece.base, 0, max(piece.tail.shape[1] - 1, 0))
    tail = piece.tail[:, tail_index] if piece.tail.shape[1] else np.zeros((len(piece.lengths), longest), np.int32)
    where = np.where(positions < piece.base, positions, tail)
    visible = (positions < piece.lengths[:, None]) & (positions >= (piece.lengths[:, None] - window if window else 0))
    where_on_device = torch.from_numpy(np.where(visible, where, 0)).to(queries.device)
    group = queries.shape[1] // keys.shape[1]
    path_keys = keys[where_on_device].repeat_interleave(group, 2)  # (num_rows, longest, num_heads, head_dim)
    path_values = values[where_on_device].repeat_interleave(group, 2)
    scores = torch.einsum("rhd,rphd->rhp", queries, path_keys) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    hidden = torch.from_numpy(~visible).to(queries.device)[:, None, :]
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None].expand(len(scores), -1, 1)), dim=2)
    return torch.einsum("rhp,rphd->rhd", scores.softmax(-1)[:, :, :longest], path_values)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    scaling: float,
    chunk: Chunk,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: (1, heads, rows, head_dim) each in, (1, rows, heads, head_dim) out.

    Writes the rows' keys and values into their slots, then attends over the slots. `chunk` travels through the model's
    keyword arguments; the mask is ours to derive, so none is given.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    attend = attend_on_cpu if query.device.type == "cpu" else _gpu_attention()
    queries = query[0].transpose(0, 1).contiguous()
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    sinks = None if s_aux is None else s_aux.float()
    out = torch.zeros_like(queries)  # padding rows have no path and stay 0
    for piece in chunk.pieces:
        piece.slot.write(layer, piece.rows, keys[piece.span], values[piece.span])
        held_keys = piece.slot.keys[layer, : piece.num_keys]
        held_values = piece.slot.values[layer, : piece.num_keys]
        out[piece.span] = attend(
            queries[piece.span], held_keys, held_values, piece, scaling, sliding_window or 0, softcap or 0.0, sinks
        )
    return out[None], None


@cache
def _gpu_attention() -> Callable[..., torch.Tensor]:
    """The kernel for GPUs; where Triton is missing, with a warning, the reference."""
    try:
        from bough.model.attention_triton import attend_by_triton
    except ImportError as exc:
        logger.warning("tree attention gathers every path, slowly and not bit for bit: Triton is missing (%s)", exc)
        return attend_by_mask
    return attend_by_triton


AttentionInterface.register(NAME, tree_attention)
