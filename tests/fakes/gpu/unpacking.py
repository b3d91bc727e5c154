"""Kernels by the code for CPUs, as Triton's interpreter takes a hundred times as long.

Weights are unpacked to the same bits as Triton's, as `tests/model/gpu/test_unpack.py` shows; sums of the delta rule are
in another order (`tests/model/gpu/test_delta_rule_triton.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from bough.model.backends.reference import BACKEND
from bough.model.cpu.delta_rule import run_on_cpu
from bough.model.cpu.unpack import write_across, write_along, write_blocks, write_down

__all__ = ["gate", "norm", "rotate", "take_steps", "write_across", "write_along", "write_blocks", "write_down"]

norm, gate = BACKEND.norm, BACKEND.gate


def rotate(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """In the kernel's layout: a row's heads are side by side."""
    return tuple(turned.transpose(1, 2).contiguous().transpose(1, 2) for turned in BACKEND.rotate(*arguments))


def take_steps(
    qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, table: torch.Tensor, states: torch.Tensor, *rest: int
) -> torch.Tensor:
    """Take steps of the gated delta rule on the CPU."""
    return run_on_cpu(qkv[: len(decay)], decay, beta, table[:, :3].long().numpy(), states, *rest)
