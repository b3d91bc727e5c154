"""Late writes: dequantizes each matrix just before its product, into the same memory as the one before.

A 70B model's whole layer in 16 bits takes 1.7 GB, its largest matrix 0.5 GB: the saved memory keeps more layers on the
device. Each further chunk of rows dequantizes again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bough.model.architecture.moe import ExpertSources
from bough.model.checkpoint.tensor_source import ReusedMemory
from bough.model.loading.loading import (
    ParameterSlot,
    Skeleton,
    bind_resident,
    move_buffers,
    read_raw,
)

_WRITES = "_bough_writes"  # attribute of a module: functions that write its matrix


@dataclass(frozen=True, slots=True)
class LateWrites:
    """Functions that write a module's matrix."""

    module: nn.Module
    writes: tuple[Callable[[], object], ...]

    def register(self) -> None:
        """Have the module call them before its forward."""
        known = self.module.__dict__
        if _WRITES not in known:
            self.module.register_forward_pre_hook(_write)
        known[_WRITES] = self.writes


def bind_all(skeleton: Skeleton, device: torch.device, stays_packed: bool = False) -> None:
    """Load a whole model permanently; if it stays packed, with memory for the largest matrix or expert written out.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    slots = [slot for layer in skeleton.layer_slots for slot in layer]
    waiting = (slot for slot in slots if stays_packed and (can_wait(slot) or isinstance(slot.source, ExpertSources)))
    late = [slot for slot in waiting if slot.source.scratch_bytes(skeleton.dtype)]
    bind_resident(skeleton, [*skeleton.resident_slots, *(slot for slot in slots if slot not in late)], device)
    move_buffers(skeleton.model, device)
    num_bytes = max((slot.source.scratch_bytes(skeleton.dtype) for slot in late), default=0)
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    for slot in late:
        scratch = ReusedMemory(memory)
        slot.bind(read_raw(slot, device), skeleton.dtype, scratch)
        if can_wait(slot):  # a table of experts writes what it is asked for
            LateWrites(slot.module, tuple(scratch.writes)).register()


def can_wait(slot: ParameterSlot) -> bool:
    """Whether a parameter is used only by its module's forward."""
    return is_late(slot.module, slot.key)


def is_late(module: nn.Module, key: str) -> bool:
    """Whether only a module's forward uses `key`: a linear layer's matrix, unless latent attention uses parts of it."""
    return isinstance(module, nn.Linear) and key == "weight" and not hasattr(module, "is_used_by_parts")


def _write(module: nn.Module, _: Any) -> None:
    for write in module.__dict__[_WRITES]:
        write()
