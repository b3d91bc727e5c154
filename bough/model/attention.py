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

import numpy as np
import torch
from transformers import AttentionInterface

from bough.model.attention_cpu import KINDS, attend_in_slots, attend_on_cpu
from bough.model.batch import Chunk, Piece

logger = logging.getLogger(__name__)

NAME = "bough"


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
    queries, keys, values = (numbers[0].transpose(0, 1) for numbers in (query, key, value))
    rules = scaling, sliding_window or 0, softcap or 0.0, None if s_aux is None else s_aux.float()
    if query.device.type == "cpu" and key.dtype in KINDS:
        return attend_in_slots(chunk, layer, queries, keys, values, *rules).to(query.dtype)[None], None
    attend = attend_on_cpu if query.device.type == "cpu" else _gpu_attention()
    queries = queries.contiguous()
    out = torch.zeros_like(queries)  # padding rows have no path and stay 0
    for piece in chunk.pieces:
        piece.slot.write(layer, piece.rows, keys[piece.span], values[piece.span])
        held_keys = piece.slot.keys[layer, : piece.num_keys]
        held_values = piece.slot.values[layer, : piece.num_keys]
        out[piece.span] = attend(queries[piece.span], held_keys, held_values, piece, *rules)
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
