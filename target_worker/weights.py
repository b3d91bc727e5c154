"""Where each layer's bytes stand on disk, as few aligned extents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bough.model.loading import SAFETENSORS_DTYPES, ParameterSlot

ALIGNMENT = 4096  # of offsets, lengths and addresses: what O_DIRECT asks for on every common file system
MAX_GAP_BYTES = 256 * 1024  # reading across a smaller hole is cheaper than a second read


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes in one file and its place in a slab; all but `needed_bytes` are multiples of ALIGNMENT."""

    file: Path
    offset: int
    num_bytes: int
    needed_bytes: int  # what must really be there: the last extent of a file may reach beyond its end
    slab_offset: int


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What to read for a layer, and where each of its parameters then is."""

    extents: tuple[Extent, ...]
    parameters: tuple[tuple[ParameterSlot, int], ...]  # with the offset of its first byte in the slab
    num_bytes: int  # room that the layer takes in a slab

    def bind(self, slab: torch.Tensor, dtype: torch.dtype) -> None:
        """Makes the layer's parameters views of a slab (uint8), or copies where the data type differs."""
        for slot, begin in self.parameters:
            place = slot.place
            raw = slab[begin : begin + place.num_bytes]
            stored = SAFETENSORS_DTYPES[place.dtype]
            if begin % stored.itemsize:
                raw = raw.clone()  # safetensors does not promise alignment
            slot.bind(raw.view(stored).view(place.shape).to(dtype))

    def tensor_at(self, file: Path, offset: int) -> str:
        """Name of the tensor that stands at a byte of a file, for error messages."""
        for slot, _ in self.parameters:
            if slot.place.file == file and slot.place.offset <= offset < slot.place.offset + slot.place.num_bytes:
                return slot.place.name
        return "padding"


def plan_layer(slots: Sequence[ParameterSlot]) -> LayerWeights:
    """Merges a layer's tensors into aligned extents, laid one after another in the slab."""
    extents: list[Extent] = []
    parameters: list[tuple[ParameterSlot, int]] = []
    slab_offset = 0
    for run in _runs(sorted(slots, key=lambda slot: (slot.place.file, slot.place.offset))):
        first, last = run[0].place, max((slot.place for slot in run), key=lambda place: place.offset + place.num_bytes)
        start = first.offset // ALIGNMENT * ALIGNMENT
        needed = last.offset + last.num_bytes - start
        length = -(-needed // ALIGNMENT) * ALIGNMENT
        extents.append(Extent(first.file, start, length, needed, slab_offset))
        parameters.extend((slot, slab_offset + slot.place.offset - start) for slot in run)
        slab_offset += length
    return LayerWeights(tuple(extents), tuple(parameters), slab_offset)


def _runs(slots: Sequence[ParameterSlot]) -> list[list[ParameterSlot]]:
    runs: list[list[ParameterSlot]] = []
    end = 0
    for slot in slots:
        place = slot.place
        if runs and runs[-1][0].place.file == place.file and place.offset - end <= MAX_GAP_BYTES:
            runs[-1].append(slot)
        else:
            runs.append([slot])
            end = 0
        end = max(end, place.offset + place.num_bytes)
    return runs
