"""Selects the kernels of a device. No other module decides this."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from bough.errors import ConfigError


class Kernels(NamedTuple):
    """Functions of `attention_triton`, `delta_rule_triton`, `unpack_triton`, `blocks_triton` in `bough.model.gpu`."""

    attend: Callable[..., torch.Tensor]
    take_steps: Callable[..., torch.Tensor]
    write_down: Callable[..., None]
    write_across: Callable[..., None]
    write_along: Callable[..., None]
    write_blocks: Callable[..., None]


def kernels_on(device: torch.device) -> Kernels | None:
    """Kernels of a device; None on the CPU, which has its own."""
    return None if device.type == "cpu" else of_gpus()


@cache
def of_gpus() -> Kernels:
    """The Triton kernels. Raises ConfigError if Triton is not installed."""
    try:
        from bough.model.gpu import attention_triton, blocks_triton, delta_rule_triton, unpack_triton
    except ImportError as exc:
        raise ConfigError(
            f"--device: for a GPU Triton must be installed, which torch's builds for GPUs bring along, got {exc}"
        ) from exc
    own = [getattr(unpack_triton, name) for name in Kernels._fields[2:-1]]
    of_rows = attention_triton.attend_by_triton, delta_rule_triton.take_steps
    return Kernels(*(*of_rows, *own, blocks_triton.write_blocks))
