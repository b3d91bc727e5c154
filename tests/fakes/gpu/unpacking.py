"""Kernels by the code for CPUs, as Triton's interpreter takes a hundred times as long.

Weights are unpacked to the same bits as Triton's, as `tests/model/gpu/test_unpack.py` shows; sums of the delta rule are
in another order (`tests/model/gpu/test_delta_rule_triton.py`). Products are rounded from float64, so that their bits do
not depend on the number of rows.
"""

from __future__ import annotations

from typing import Any

import torch

from bough.model.backend import load
from bough.model.backends.reference import BACKEND
from bough.model.cpu.delta_rule import run_on_cpu
from bough.model.cpu.unpack import write
from bough.model.packed import ExpertTiles, Matrix, Stack

__all__ = [
    "combine",
    "expert_tiles",
    "gate",
    "linear_by_head",
    "multiply",
    "multiply_grouped",
    "norm",
    "rotate",
    "take_steps",
    "write",
]

norm, gate, combine, expert_tiles = BACKEND.norm, BACKEND.gate, BACKEND.combine, BACKEND.tiles_of


def rotate(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """In the kernel's layout: a row's heads are side by side."""
    return tuple(turned.transpose(1, 2).contiguous().transpose(1, 2) for turned in BACKEND.rotate(*arguments))


def take_steps(
    qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, table: torch.Tensor, states: torch.Tensor, *rest: int
) -> torch.Tensor:
    """Take steps of the gated delta rule on the CPU."""
    return run_on_cpu(qkv[: len(decay)], decay, beta, table[:, :3].long().numpy(), states, *rest)


def multiply(rows: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A product with the written-out matrix."""
    out = rows.double() @ load("cpu").written_out(matrix, rows.dtype).double().t()
    return (out if bias is None else out + bias.double()).to(rows.dtype)


def linear_by_head(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Each head's product."""
    return torch.stack([multiply(*head) for head in zip(rows, matrices, strict=True)], 1)


def multiply_grouped(rows: torch.Tensor, stack: Stack, tiles: ExpertTiles, is_sorted: bool = False) -> torch.Tensor:
    """Each tile's product; entries without one are no numbers."""
    out = rows.new_full((len(tiles.places), stack.first.shape[0]), torch.nan)
    for expert, begin, end in tiles.table.tolist():
        if begin < end:
            own = rows[begin:end] if is_sorted else rows[tiles.places[begin:end]]
            matrix = stack.matrices[expert]
            assert matrix is not None, "an expert that was chosen is on the device"
            out[begin:end] = multiply(own, matrix, stack.biases[expert])
    return out
