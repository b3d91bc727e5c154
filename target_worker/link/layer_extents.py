"""Where each layer's bytes stand on disk, as few aligned extents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bough.errors import CheckpointError, StreamError
from bough.model.architecture.moe import stack_of
from bough.model.checkpoint.checkpoint import TensorPlace
from bough.model.checkpoint.tensor_source import ReusedMemory, crc32
from bough.model.loading.late_writes import LateWrites, can_wait
from bough.model.loading.loading import ParameterSlot, require_checksum
from bough.sizing.placement import ExpertSizes, SeparateExperts

ALIGNMENT = 4096  # of offsets, lengths and addresses: what O_DIRECT asks for on every common file system
FILE_ALIGNMENT, DEVICE_ALIGNMENT = 8, 16  # of tensors in a file, as a rule; and where products read them
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
class MadeLayer:
    """Values of a layer's parameters, and how those are written that are no views of its bytes."""

    values: tuple[Any, ...]
    writes: tuple[Callable[[], object], ...]
    late_writes: tuple[LateWrites, ...] = ()  # of matrices that are written when they are multiplied by

    def write(self) -> None:
        """To where they were, when the layer's bytes have come to the same slab again; but what is written late."""
        for write in self.writes:
            write()


@dataclass(frozen=True, slots=True)
class LayerExtents:
    """What to read for a layer, and where each of its tensors then is."""

    name: str  # "layer 7", for error messages
    extents: tuple[Extent, ...]
    slots: tuple[ParameterSlot, ...]
    begins: dict[TensorPlace, int]  # offset of each tensor's first byte in the slab
    num_bytes: int  # room that the layer takes in a slab

    def made(self, slab: torch.Tensor, dtype: torch.dtype, scratch: ReusedMemory, by_matrix: bool = False) -> MadeLayer:
        """The values of the layer's parameters from a slab (uint8): views of it, or written to scratch memory.

        With `by_matrix` those of linear layers share one room there, in which each is to be written when it is wanted.
        """
        late = self._late(dtype) if by_matrix else []
        values, writes = dict[int, Any](), list[LateWrites]()
        for index in late:
            scratch.begin(is_late=True)
            values[index] = self._value(index, slab, dtype, scratch)
            writes.append(LateWrites(self.slots[index].module, tuple(scratch.writes)))
        scratch.begin(self._late_bytes(late, dtype))
        values |= {i: self._value(i, slab, dtype, scratch) for i in range(len(self.slots)) if i not in values}
        return MadeLayer(tuple(values[i] for i in range(len(self.slots))), tuple(scratch.writes), tuple(writes))

    def _value(self, index: int, slab: torch.Tensor, dtype: torch.dtype, scratch: ReusedMemory) -> Any:
        slot = self.slots[index]
        return slot.made([self.bytes_of(place, slab) for place in slot.source.places], dtype, scratch)

    def put(self, made: MadeLayer) -> None:
        """Gives the layer's parameters values that were made from its bytes."""
        for slot, value in zip(self.slots, made.values, strict=True):
            slot.put(value)
        for late in made.late_writes:
            late.put()

    def scratch_bytes(self, dtype: torch.dtype, by_matrix: bool = False) -> int:
        """What `made` takes of the scratch memory."""
        late = self._late(dtype) if by_matrix else []
        early = (slot.source.scratch_bytes(dtype) for i, slot in enumerate(self.slots) if i not in late)
        return self._late_bytes(late, dtype) + sum(early)

    def _late(self, dtype: torch.dtype) -> list[int]:
        """Slots of matrices that can be written when they are multiplied by."""
        return [i for i, slot in enumerate(self.slots) if slot.source.scratch_bytes(dtype) and can_wait(slot)]

    def _late_bytes(self, late: Sequence[int], dtype: torch.dtype) -> int:
        return max((self.slots[index].source.scratch_bytes(dtype) for index in late), default=0)

    @property
    def device_shift(self) -> int:
        """How far behind a multiple of 16 the layer's bytes are to begin, so that most of its weights begin at one.

        GPUs' products want operands there; safetensors promises 8.
        """
        at = Counter[int]()
        for place, begin in self.begins.items():
            at[begin % DEVICE_ALIGNMENT] += place.num_bytes
        return FILE_ALIGNMENT if at[FILE_ALIGNMENT] > at[0] else 0

    def tensor_at(self, file: Path, offset: int) -> str:
        """Name of the tensor that stands at a byte of a file, for error messages."""
        for place in self.begins:
            if place.file == file and place.offset <= offset < place.offset + place.num_bytes:
                return place.name
        return "padding"

    def verify(self, slab: torch.Tensor, checksums: Mapping[str, int]) -> None:
        """Compares the tensors with their checksums, as far as there are any.

        Raises:
            StreamError: naming the file and the tensor.
        """
        for place in self.begins:
            try:
                require_checksum(place, crc32(self.bytes_of(place, slab)), checksums)
            except CheckpointError as exc:
                raise StreamError(str(exc)) from exc

    def bytes_of(self, place: TensorPlace, slab: torch.Tensor) -> torch.Tensor:
        """A tensor's bytes in a slab, (num_bytes,) uint8."""
        begin = self.begins[place]
        return slab[begin : begin + place.num_bytes]


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """A layer's experts, each of which can be read by itself."""

    slots: tuple[ParameterSlot, ...]  # whose sources are `Experts`
    each: tuple[LayerExtents, ...]  # by number

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """What the values of one parameter of one expert take of the scratch memory."""
        return max(slot.source.scratch_bytes(dtype) for slot in self.slots)


def sizes_of(layers: Collection[LayerExperts]) -> ExpertSizes:
    """Of all layers' experts."""
    sizes = [expert.num_bytes for layer in layers for expert in layer.each]
    return ExpertSizes(max(sizes), max(len(layer.each) for layer in layers), len(sizes), sum(sizes))


def sizes_apart(
    layers: Sequence[LayerExtents],
    experts: Mapping[int, LayerExperts],
    dtype: torch.dtype,
    unpacking: int,
    by_matrix: bool = False,
) -> SeparateExperts:
    """Of layers without their experts, and of these; `unpacking` bytes of scratch memory are taken besides."""
    scratch = max(layer.scratch_bytes(dtype, by_matrix) for layer in layers)
    scratch += max(layer.scratch_bytes(dtype) for layer in experts.values())
    return SeparateExperts([layer.num_bytes for layer in layers], sizes_of(experts.values()), scratch + unpacking)


def plan_apart(layers: Sequence[Sequence[ParameterSlot]]) -> tuple[tuple[LayerExtents, ...], dict[int, LayerExperts]]:
    """Layers without their experts, and these by the numbers of the layers that have any."""
    parts = [_split(f"layer {index}", slots) for index, slots in enumerate(layers)]
    return tuple(layer for layer, _ in parts), {i: experts for i, (_, experts) in enumerate(parts) if experts}


def _split(name: str, slots: Sequence[ParameterSlot]) -> tuple[LayerExtents, LayerExperts | None]:
    """A layer without its experts, and these; None where there are none."""
    stacks = [(slot, stack) for slot in slots if (stack := stack_of(slot.module, slot.source))]
    if not stacks:
        return plan_layer(name, slots), None
    each = [
        plan_layer(
            f"{name}, expert {number}",
            [ParameterSlot(slot.module, slot.key, part) for (slot, _), part in zip(stacks, parts, strict=True)],
        )
        for number, parts in enumerate(zip(*(stack.parts for _, stack in stacks), strict=True))
    ]
    rest = [slot for slot in slots if stack_of(slot.module, slot.source) is None]
    apart = tuple(ParameterSlot(slot.module, slot.key, stack) for slot, stack in stacks)
    return plan_layer(name, rest), LayerExperts(apart, tuple(each))


def plan_layer(name: str, slots: Sequence[ParameterSlot]) -> LayerExtents:
    """Merges a layer's tensors into aligned extents, laid one after another in the slab."""
    extents: list[Extent] = []
    begins: dict[TensorPlace, int] = {}
    slab_offset = 0
    places = {place for slot in slots for place in slot.source.places}
    for run in _runs(sorted(places, key=lambda place: (place.file, place.offset))):
        first, last = run[0], max(run, key=lambda place: place.offset + place.num_bytes)
        start = first.offset // ALIGNMENT * ALIGNMENT
        needed = last.offset + last.num_bytes - start
        length = -(-needed // ALIGNMENT) * ALIGNMENT
        extents.append(Extent(first.file, start, length, needed, slab_offset))
        begins.update((place, slab_offset + place.offset - start) for place in run)
        slab_offset += length
    return LayerExtents(name, tuple(extents), tuple(slots), begins, slab_offset)


def _runs(places: Sequence[TensorPlace]) -> list[list[TensorPlace]]:
    runs: list[list[TensorPlace]] = []
    end = 0
    for place in places:
        if runs and runs[-1][0].file == place.file and place.offset - end <= MAX_GAP_BYTES:
            runs[-1].append(place)
        else:
            runs.append([place])
            end = 0
        end = max(end, place.offset + place.num_bytes)
    return runs
