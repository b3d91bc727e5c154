"""Matrices that are written out of few bits when they are multiplied by, each in the room of the one before.

A whole layer of a 70B in 16 bits is 1.7 GB, its largest matrix 0.5 GB: what is not taken for the others keeps more
layers on the device. A chunk of rows that comes after another writes them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bough.model.checkpoint.tensor_source import ReusedMemory, crc32
from bough.model.loading.loading import (
    ParameterSlot,
    Skeleton,
    bind_resident,
    move_buffers,
    read_place,
    require_checksum,
)

_WRITES = "_bough_writes"  # of a module: how its matrix is written


@dataclass(frozen=True, slots=True)
class LateWrites:
    """How a module's matrix is written."""

    module: nn.Module
    writes: tuple[Callable[[], object], ...]

    def put(self) -> None:
        """Has it be written so before the module is called."""
        known = self.module.__dict__
        if _WRITES not in known:
            self.module.register_forward_pre_hook(_write)
        known[_WRITES] = self.writes


def bind_packed(skeleton: Skeleton, device: torch.device) -> None:
    """Loads a whole model for good, its packed matrices as they are, beside room for the largest of them written out.

    Raises:
        CheckpointError: a tensor cannot be read, or does not have its checksum.
    """
    slots = [slot for layer in skeleton.layer_slots for slot in layer]
    late = [slot for slot in slots if can_wait(slot) and slot.source.scratch_bytes(skeleton.dtype)]
    bind_resident(skeleton, skeleton.resident_slots, device)
    bind_resident(skeleton, [slot for slot in slots if slot not in late], device)
    move_buffers(skeleton.model, device)
    room = max((slot.source.scratch_bytes(skeleton.dtype) for slot in late), default=0)
    memory = torch.empty(room, dtype=torch.uint8, device=device)
    for slot in late:
        scratch, raw = ReusedMemory(memory), [read_place(place) for place in slot.source.places]
        for place, data in zip(slot.source.places, raw, strict=True):
            require_checksum(place, crc32(data), skeleton.checksums)
        slot.bind([data.to(device) for data in raw], skeleton.dtype, scratch)
        LateWrites(slot.module, tuple(scratch.writes)).put()


def can_wait(slot: ParameterSlot) -> bool:
    """Whether a parameter is used nowhere but where its module is called."""
    return is_late(slot.module, slot.key)


def is_late(module: nn.Module, key: str) -> bool:
    """The same by module and name: of a linear layer its matrix."""
    return isinstance(module, nn.Linear) and key == "weight"


def _write(module: nn.Module, _: Any) -> None:
    for write in module.__dict__[_WRITES]:
        write()
