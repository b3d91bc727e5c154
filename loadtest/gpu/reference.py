"""Computes what the GPU's kernels compute, with torch's operators or the CPU's kernel; sums have other orders."""

from __future__ import annotations

from typing import Any

import torch

from bough.model.backends.reference import BACKEND, take_steps
from bough.model.backends.triton import Kernels
from bough.model.batch.batch import BatchPart
from bough.model.batch.path_spans import Paths, PathSpans, Place
from bough.model.cpu.attention_kernel import attend_over


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
    """Attention, with sums in float64, by gathering each row's path.

    queries (num_rows, num_heads, head_dim); keys and values (num_memory_rows, num_kv_heads, head_dim). If queries
    are wider, a key has its value as a second part.
    """
    queries, keys, values = queries.double(), keys.double(), values.double()
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
    return torch.einsum("rhp,rphd->rhd", scores.softmax(-1)[:, :, : where.shape[1]], path_values).float()


def attend_on_cpu(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, piece: BatchPart, *rules: Any
) -> torch.Tensor:
    """Attention of a piece's rows by the CPU's kernel, in float32; operands as of `attend_by_mask`."""
    stored_keys, stored_values = (numbers.float().contiguous() for numbers in (keys, values))
    place = Place(stored_keys.data_ptr(), stored_values.data_ptr(), len(keys))
    spans = PathSpans.at([place], [piece], keys.shape[1])
    return attend_over(spans, 0, *values.shape[1:], queries.float(), *rules)


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


def steps_of_table(
    qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, table: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """Take steps of the gated delta rule one by one; shapes are those of the kernel, `delta_rule_triton.take_steps`."""
    return take_steps(qkv, decay, beta, table[:, :3].tolist(), *rest)


def kernels_by_torch() -> Kernels:
    """All kernels."""
    ours = BACKEND
    parts = ours.norm, ours.rotate, ours.gate, ours.combine, ours.write
    products = ours.multiply, ours.linear_by_head, ours.multiply_grouped, ours.tiles_of
    return Kernels(attend_by_mask, steps_of_table, *parts, *products)
