"""Where each layer's bytes are on disk, as few aligned extents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bough.model.architecture.moe import stack_of
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.tensor_source import ReusedMemory
from bough.model.loading.loading import LateWrites, ParameterSlot, can_wait
from bough.sizing.placement import ExpertSizes, SeparateExperts

ALIGNMENT = 4096  # of offsets, lengths and addresses: what O_DIRECT requires on all common file systems
FILE_ALIGNMENT, DEVICE_ALIGNMENT = 8, 16  # usual for tensors in a file; fastest for operands of products
MAX_GAP_BYTES = 256 * 1024  # reading across a smaller hole is cheaper than a second read


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes in one file and its place in a slab; all but `needed_bytes` are multiples of ALIGNMENT."""

    file: Path
    offset: int
    num_bytes: int
    needed_bytes: int  # bytes that must exist: the last extent of a file may extend beyond its end
    slab_offset: int


@dataclass(frozen=True, slots=True)
class MaterializedLayer:
    """Values of a layer's parameters, and functions that dequantize those that are not views of its bytes."""

    values: tuple[Any, ...]
    writes: tuple[Callable[[], object], ...]
    late_writes: tuple[LateWrites, ...] = ()  # of matrices that are dequantized when used

    def write(self) -> None:
        """Dequantize again after the layer's bytes were read into the same slab again; without late writes."""
        for write in self.writes:
            write()


@dataclass(frozen=True, slots=True)
class LayerExtents:
    """What to read for a layer, and where each tensor is in the slab."""

    name: str  # "layer 7", for error messages
    extents: tuple[Extent, ...]
    slots: tuple[ParameterSlot, ...]
    begins: dict[TensorPlace, int]  # offset of each tensor's first byte in the slab
    num_bytes: int  # that the layer takes in a slab

    def materialize(
        self, slab: torch.Tensor, dtype: torch.dtype, scratch: ReusedMemory, by_matrix: bool = False
    ) -> MaterializedLayer:
        """Make the values of the layer's parameters from a slab (uint8): views of it, or written to scratch memory.

        With `by_matrix` linear layers whose products do not read packed values share one scratch buffer, and each is
        dequantized just before its product.
        """
        late = self._late(dtype) if by_matrix else []
        values, writes = dict[int, Any](), list[LateWrites]()
        for index in late:
            scratch.begin(is_late=True)
            values[index] = self._value(index, slab, dtype, scratch, by_matrix)
            writes.append(LateWrites(self.slots[index].module, tuple(scratch.writes)))
        scratch.begin(self._late_bytes(late, dtype))
        values |= {
            i: self._value(i, slab, dtype, scratch, by_matrix) for i in range(len(self.slots)) if i not in values
        }
        return MaterializedLayer(tuple(values[i] for i in range(len(self.slots))), tuple(scratch.writes), tuple(writes))

    def _value(self, index: int, slab: torch.Tensor, dtype: torch.dtype, scratch: ReusedMemory, by_matrix: bool) -> Any:
        slot = self.slots[index]
        raw = [self.bytes_of(place, slab) for place in slot.source.places]
        return slot.materialize(raw, dtype, scratch, by_matrix)

    def assign(self, layer: MaterializedLayer) -> None:
        """Set the layer's parameters to values made by `materialize`."""
        for slot, value in zip(self.slots, layer.values, strict=True):
            slot.assign(value)
        for late in layer.late_writes:
            late.register()

    def scratch_bytes(self, dtype: torch.dtype, by_matrix: bool = False) -> int:
        """Bytes of scratch memory that `materialize` takes."""
        late = self._late(dtype) if by_matrix else []
        early = (slot.scratch_bytes(dtype, by_matrix) for i, slot in enumerate(self.slots) if i not in late)
        return self._late_bytes(late, dtype) + sum(early)

    def _late(self, dtype: torch.dtype) -> list[int]:
        """Indices of slots that can be dequantized just before their product."""
        return [i for i, slot in enumerate(self.slots) if slot.scratch_bytes(dtype, by_matrix=True) and can_wait(slot)]

    def _late_bytes(self, late: Sequence[int], dtype: torch.dtype) -> int:
        return max((self.slots[index].source.scratch_bytes(dtype) for index in late), default=0)

    @property
    def device_shift(self) -> int:
        """Offset (0 or 8) from a multiple of 16 at which to place the layer, to align most weights to 16.

        GPUs' products want operands there; safetensors guarantees only 8.
        """
        at = Counter[int]()
        for place, begin in self.begins.items():
            at[begin % DEVICE_ALIGNMENT] += place.num_bytes
        return FILE_ALIGNMENT if at[FILE_ALIGNMENT] > at[0] else 0

    def tensor_at(self, file: Path, offset: int) -> str:
        """Name of the tensor at a byte of a file, for error messages."""
        for place in self.begins:
            if place.file == file and place.offset <= offset < place.offset + place.num_bytes:
                return place.name
        return "padding"

    def bytes_of(self, place: TensorPlace, slab: torch.Tensor) -> torch.Tensor:
        """A tensor's bytes in a slab, (num_bytes,) uint8."""
        begin = self.begins[place]
        return slab[begin : begin + place.num_bytes]


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """A layer's experts, each of which can be read separately."""

    slots: tuple[ParameterSlot, ...]  # whose sources are `ExpertSources`
    each: tuple[LayerExtents, ...]  # by index in the layer

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """Scratch bytes for one parameter of one expert."""
        return max(slot.source.scratch_bytes(dtype) for slot in self.slots)


def sizes_of(layers: Collection[LayerExperts]) -> ExpertSizes:
    """Sizes of all layers' experts."""
    sizes = [expert.num_bytes for layer in layers for expert in layer.each]
    return ExpertSizes(max(sizes), max(len(layer.each) for layer in layers), len(sizes), sum(sizes))


def sizes_apart(
    layers: Sequence[LayerExtents], experts: Mapping[int, LayerExperts], dtype: torch.dtype, by_matrix: bool = False
) -> SeparateExperts:
    """Sizes of layers without experts, and of their experts."""
    scratch = max(layer.scratch_bytes(dtype, by_matrix) for layer in layers)
    scratch += max(layer.scratch_bytes(dtype) for layer in experts.values())
    return SeparateExperts([layer.num_bytes for layer in layers], sizes_of(experts.values()), scratch)


def plan_apart(layers: Sequence[Sequence[ParameterSlot]]) -> tuple[tuple[LayerExtents, ...], dict[int, LayerExperts]]:
    """Layers without their experts, and the experts by layer number."""
    parts = [_split(f"layer {index}", slots) for index, slots in enumerate(layers)]
    return tuple(layer for layer, _ in parts), {i: experts for i, (_, experts) in enumerate(parts) if experts}


def _split(name: str, slots: Sequence[ParameterSlot]) -> tuple[LayerExtents, LayerExperts | None]:
    """A layer without its experts, and its experts or None."""
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
    """Merge a layer's tensors into aligned extents, placed one after another in the slab."""
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
