"""Selects the kernels of a device: Triton's, if it is installed. No other module decides this."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)


class Kernels(NamedTuple):
    """Functions of `attention_triton`, `delta_rule_triton`, `unpack_triton`, `blocks_triton` in `bough.model.gpu`."""

    attend: Callable[..., torch.Tensor]
    take_steps: Callable[..., torch.Tensor]
    write_own: Callable[..., None]
    write_down: Callable[..., None]
    write_across: Callable[..., None]
    write_along: Callable[..., None]
    write_blocks: Callable[..., None]


def kernels_on(device: torch.device) -> Kernels | None:
    """Kernels of a device; None on the CPU, which has its own, and where torch's operators are used instead."""
    return None if device.type == "cpu" else of_gpus()


@cache
def of_gpus() -> Kernels | None:
    """The Triton kernels; None, with a warning, if Triton is not installed."""
    try:
        from bough.model.gpu import attention_triton, blocks_triton, delta_rule_triton, unpack_triton
    except ImportError as exc:
        logger.warning(
            "attention gathers every path, not bit for bit, and recurrent layers and weights of 4 and 8 bits are many "
            "times slower than they could be: Triton is missing (%s)",
            exc,
        )
        return None
    own = [getattr(unpack_triton, name) for name in Kernels._fields[2:-1]]
    of_rows = attention_triton.attend_by_triton, delta_rule_triton.take_steps
    return Kernels(*(*of_rows, *own, blocks_triton.write_blocks))
