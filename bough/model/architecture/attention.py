"""Tree attention, registered as an attention function of transformers.

Every row attends to the keys on its own path, in the order of positions and in blocks fixed by position. So its result
depends on its query and its path alone, bit for bit, not on the rest of the tree or the batch.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import AttentionInterface

from bough.errors import CheckpointError
from bough.model.architecture.latent import absorbed, expanded, is_latent
from bough.model.batch.batch import Chunk
from bough.model.batch.gpu_paths import Paths
from bough.model.cpu.attention_cpu import KINDS, attend_in_slots, attend_on_cpu
from bough.model.gpu.kernels import kernels_on

NAME = "bough"


def attend_by_mask(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    paths: Paths,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention on any device by gathering each row's path: correct, but slow and not bitwise reproducible.

    queries (num_rows, num_heads, head_dim); keys and values (num_memory_rows, num_kv_heads, head_dim). Where queries
    are wider, a key has its value as a second part. Reference for the kernels, and used on a GPU without Triton.
    """
    queries, keys, values = queries.float(), keys.float(), values.float()
    if queries.shape[2] > keys.shape[2]:
        keys = torch.cat((keys, values), 2)
    where, visible = _gathered(paths, window)
    group = queries.shape[1] // keys.shape[1]
    path_keys = keys[where].repeat_interleave(group, 2)  # (num_rows, longest, num_heads, head_dim)
    path_values = values[where].repeat_interleave(group, 2)
    scores = torch.einsum("rhd,rphd->rhp", queries, path_keys) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~visible[:, None, :], -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None].expand(len(scores), -1, 1)), dim=2)
    return torch.einsum("rhp,rphd->rhd", scores.softmax(-1)[:, :, : where.shape[1]], path_values)


def _gathered(paths: Paths, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory rows of each row's path by position, (num_rows, longest), and whether the row sees that position."""
    lengths, bases = paths.lengths[:, None], paths.bases[:, None]
    positions = torch.arange(int(paths.lengths.max()), device=lengths.device)
    where = paths.origins[:, None] + positions
    width = paths.tails.shape[1]
    if width:
        in_tail = (positions - bases).clamp(0, width - 1)
        where = torch.where(positions < bases, where, paths.tails.gather(1, in_tail))
    visible = (positions < lengths) & (positions >= (lengths - window if window else 0))
    return torch.where(visible, where, paths.rows[:, None]), visible  # a written row: NaN times 0 is NaN


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
    """Implements transformers' attention interface: (1, heads, rows, head_dim) in, (1, rows, heads, head_dim) out.

    Writes the rows' keys and values into their slots, then attends over the slots. `chunk` comes through the model's
    keyword arguments; the mask is implied by it.
    """
    layer = cast(int, module.layer_idx)
    _require_room(chunk, layer, key, value)
    keys, values = (numbers[0].transpose(0, 1) for numbers in (key, value))
    queries = absorbed(module, query) if is_latent(module) else query[0].transpose(0, 1)
    rules = scaling, sliding_window or 0, softcap or 0.0, None if s_aux is None else s_aux.float()
    if query.device.type == "cpu" and chunk.pieces:
        attend = attend_in_slots if key.dtype in KINDS else _attend_by_piece
        out = attend(chunk, layer, queries, keys, values, *rules).to(query.dtype)
    else:
        out = _attend_on_paths(chunk, layer, queries.contiguous(), keys, values, *rules)
    return (expanded(module, out) if is_latent(module) else out)[None], None


def _require_room(chunk: Chunk, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Check sizes before kernels write. Raises CheckpointError if the slots' sizes differ."""
    for piece in chunk.pieces[:1]:
        for name, numbers, held in (("keys", key, piece.slot.keys), ("values", value, piece.slot.values)):
            found, room = (numbers.shape[1], numbers.shape[3]), tuple(held.shape[2:])
            if found != room:
                raise CheckpointError(
                    f"config.json: {name} of all layers must be {room[0]} heads of {room[1]} numbers, as it says, got "
                    f"{found[0]} of {found[1]} in layer {layer}"
                )


def _attend_on_paths(
    chunk: Chunk, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rules: Any
) -> torch.Tensor:
    """Attend with all rows of a chunk at once: on a device, or on a CPU for a chunk without pieces."""
    paths, (held_keys, held_values) = chunk.paths_on(queries.device), chunk.memory(layer)
    num_rows = len(paths.rows)
    held_keys.index_copy_(0, paths.rows, keys[:num_rows])
    held_values.index_copy_(0, paths.rows, values[:num_rows])
    kernels = kernels_on(queries.device)
    attend = kernels.attend if kernels else attend_by_mask
    out = queries.new_zeros(*queries.shape[:2], values.shape[2])  # padding rows have no path and stay 0
    out[:num_rows] = attend(queries[:num_rows], held_keys, held_values, paths, *rules)
    return out


def _attend_by_piece(
    chunk: Chunk, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rules: Any
) -> torch.Tensor:
    """Attend piece by piece on a CPU, converting slots of a dtype that the kernel cannot read."""
    out, memory = queries.new_zeros(*queries.shape[:2], values.shape[2]), chunk.memory(layer)
    for piece, begin in zip(chunk.pieces, chunk.begins, strict=True):
        held_keys, held_values = (rows[begin : begin + piece.num_keys] for rows in memory)
        held_keys[piece.rows], held_values[piece.rows] = keys[piece.span], values[piece.span]
        out[piece.span] = attend_on_cpu(queries[piece.span], held_keys, held_values, piece, *rules).to(out.dtype)
    return out


AttentionInterface.register(NAME, tree_attention)
