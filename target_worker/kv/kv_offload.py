"""KV in host memory, copied to the device layer by layer.

A device needs the KV of one layer at a time, so the KV of long contexts and many sessions may stay on the host. The
device has buffers for two layers: one is computed while the next is copied. Added rows are copied back. The sessions of
a sweep copy all their KV, in addition to the weights. Other devices that have layers have buffers for the KV of those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol, cast

import torch

from bough.model.batch.batch import Batch, Chunk
from bough.model.batch.path_spans import PathSpans, Place
from bough.model.kv.session_kv import KVMemory, KVShape, KVSlot
from bough.model.kv.split_layers import SplitLayers
from bough.runtime.host_memory import in_pieces
from bough.sizing.placement import STAGED_LAYERS
from target_worker.link.host_layers import PIECE_BYTES
from target_worker.link.streams import DeviceEvent, DeviceStreams


class KVHome(Protocol):
    """Where a sweep finds its KV."""

    @property
    def num_bytes(self) -> int:
        """Bytes copied between host and devices since the start."""
        ...

    def sweep(self, batch: Batch) -> AbstractContextManager[Batch]:
        """Yield the batch with its KV where layers read it; when the block ends, slots hold the added rows."""
        ...

    def layer(self, index: int) -> AbstractContextManager[None]:
        """A layer's attention must be queued within the block; layers come in order from 0."""
        ...


class KVInPlace:
    """KV read from the slots themselves."""

    num_bytes = 0

    def sweep(self, batch: Batch) -> AbstractContextManager[Batch]:
        """Return the batch unchanged."""
        return nullcontext(batch)

    def layer(self, index: int) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()


class _Seat(NamedTuple):
    """The rows of a slot in the device buffers, and which of them the sweep writes."""

    begin: int  # first row in the buffer
    first: int  # first slot row that the sweep writes; earlier rows are copied to the device
    end: int  # rows `first` to `end` are copied back


class _Stage:
    """A device's buffers for the KV of two of its layers, of all slots in a sweep."""

    def __init__(self, shape: KVShape, num_rows: int, lanes: DeviceStreams, layers: Sequence[int]) -> None:
        """`layers` are those that the device computes, in order."""
        self.num_bytes = 0  # copied since the start
        self.layers = tuple(layers)
        self.rooms = [_room(shape, num_rows, lanes) for _ in range(STAGED_LAYERS)]
        self.room_of = {layer: place % STAGED_LAYERS for place, layer in enumerate(layers)}
        self._next = dict(pairwise(layers))
        self._lanes = lanes
        self._seats: Mapping[KVSlot, _Seat] = {}
        self._free: DeviceEvent | None = None  # when all earlier sweeps' use of the buffers has ended
        self._ready: list[DeviceEvent | None] = [None] * STAGED_LAYERS  # by buffer: when its next layer may be computed
        self._last: DeviceEvent | None = None  # end of the last queued copy

    def begin(self, seats: Mapping[KVSlot, _Seat]) -> None:
        """Start a sweep: copy the first layer."""
        self._seats = seats
        self._free = self._lanes.compute_mark()  # the computation of an aborted sweep may still be queued
        self._bring(self.layers[0])

    def end(self) -> None:
        """Wait until the slots hold the added rows."""
        if self._last is not None:
            self._last.synchronize()

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Copy the device's next layer while this one is computed."""
        ready = self._ready[self.room_of[index]]
        if ready is not None:
            self._lanes.compute_after(ready)
        if index in self._next:
            self._bring(self._next[index])
        yield
        self._take_back(index, self._lanes.compute_mark())

    def _bring(self, layer: int) -> None:
        """Queue copies of the rows that the slots already hold, after earlier use of the buffer."""
        room = self.rooms[self.room_of[layer]]
        for slot, (begin, first, _) in self._seats.items():
            if first:
                for held, staged in zip((slot.keys, slot.values), room, strict=True):
                    self._copy(held[layer, :first], staged[begin : begin + first], self._free)
        self._ready[self.room_of[layer]] = self._last

    def _take_back(self, layer: int, computed: DeviceEvent) -> None:
        """Queue copies of the rows that the sweep has added."""
        room = self.rooms[self.room_of[layer]]
        for slot, (begin, first, end) in self._seats.items():
            for held, staged in zip((slot.keys, slot.values), room, strict=True):
                self._copy(staged[begin + first : begin + end], held[layer, first:end], computed)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None) -> None:
        self.num_bytes += source.nbytes
        self._last = self._lanes.copy(source, target, after).done


class OffloadedKV:
    """A stage for each device that computes layers."""

    def __init__(
        self,
        shape: KVShape,
        num_rows: int,
        lanes: DeviceStreams,
        elsewhere: Mapping[int, DeviceStreams] | None = None,
    ) -> None:
        """`num_rows` is the total of all slots; `elsewhere` has the lanes of layers on other devices.

        No lanes may be used by others; the caller closes them.
        """
        by_lanes = _layers_by(shape, lanes, elsewhere or {})
        self._stages = [_Stage(shape, num_rows, own, layers) for own, layers in by_lanes.items()]
        self._stage_of = {layer: stage for stage in self._stages for layer in stage.layers}

    @property
    def num_bytes(self) -> int:
        """Bytes copied between the host and all devices since the start."""
        return sum(stage.num_bytes for stage in self._stages)

    @contextmanager
    def sweep(self, batch: Batch) -> Iterator[Batch]:
        """Place the slots one after another in the buffers, in the same rows on every device."""
        seats = _seated(batch)
        for stage in self._stages:
            stage.begin(seats)
        begins, rooms = {slot: seat.begin for slot, seat in seats.items()}, self._rooms
        try:
            yield batch.seen_as([_staged(chunk, rooms, begins) for chunk in batch.chunks])
        finally:
            for stage in self._stages:
                stage.end()

    def layer(self, index: int) -> AbstractContextManager[None]:
        """Compute a layer on the stage of its device."""
        return self._stage_of[index].layer(index)

    @property
    def _rooms(self) -> list[KVMemory]:
        """The buffer of each layer."""
        of = (self._stage_of[layer] for layer in range(len(self._stage_of)))
        return [stage.rooms[stage.room_of[layer]] for layer, stage in enumerate(of)]


def memory_on_host(
    shape: KVShape, num_rows: int, lanes: DeviceStreams, elsewhere: Mapping[int, DeviceStreams] | None = None
) -> KVMemory:
    """Allocate host memory for the KV of `num_rows` tokens, each layer's near the device that computes it.

    Memory is pinned in pieces of whole layers, like that of weights: if CUDA refuses one, the others stay pinned.
    """
    return KVMemory(*(_in_pieces(shape, num_rows, _layers_by(shape, lanes, elsewhere or {})) for _ in range(2)))


def _layers_by(
    shape: KVShape, lanes: DeviceStreams, elsewhere: Mapping[int, DeviceStreams]
) -> dict[DeviceStreams, list[int]]:
    found: dict[DeviceStreams, list[int]] = {}
    for layer in range(shape.num_layers):
        found.setdefault(elsewhere.get(layer, lanes), []).append(layer)
    return found


def _in_pieces(shape: KVShape, num_rows: int, layers_by: Mapping[DeviceStreams, Sequence[int]]) -> torch.Tensor:
    """Allocate the keys, or the values."""
    _, *size = shape.size(num_rows)
    layer_bytes = math.prod(size) * shape.dtype.itemsize
    parts, places = list[torch.Tensor](), dict[int, tuple[int, int]]()
    for lanes, layers in layers_by.items():
        left = iter(layers)
        for run in in_pieces([layer_bytes] * len(layers), PIECE_BYTES):
            memory = lanes.host_memory(sum(run))[: sum(run)]
            places |= {next(left): (len(parts), number) for number in range(len(run))}
            parts.append(torch.frombuffer(memory, dtype=shape.dtype).view(len(run), *size))
    return cast(torch.Tensor, SplitLayers(parts, [places[layer] for layer in range(shape.num_layers)]))


def _room(shape: KVShape, num_rows: int, lanes: DeviceStreams) -> KVMemory:
    """A buffer for one layer's keys and values, (num_rows, num_kv_heads, head_dim) each."""
    size = shape.size(num_rows)[1:]
    num_bytes = num_rows * shape.row_bytes // shape.num_layers // 2
    return KVMemory(*(lanes.device_memory(num_bytes).view(shape.dtype).view(size) for _ in range(2)))


def _seated(batch: Batch) -> dict[KVSlot, _Seat]:
    """Assign buffer rows to every slot. A sweep writes the rows that follow those which a slot holds."""
    reach: dict[KVSlot, tuple[int, int]] = {}
    for segment in batch.segments:
        slot = segment.slot
        assert isinstance(slot, KVSlot), "there are keys to be copied"
        first, end = reach.get(slot, (slot.num_rows, 0))
        reach[slot] = min(first, int(segment.rows.min())), max(end, int(segment.rows.max()) + 1)
    seats, begin = {}, 0
    for slot, (first, end) in reach.items():
        seats[slot] = _Seat(begin, first, end)
        begin += end
    return seats


@dataclass(frozen=True)
class _StagedChunk(Chunk):
    """Rows whose keys and values are in the device buffers."""

    rooms: list[KVMemory]  # by layer
    staged_begins: list[int]

    @property
    def begins(self) -> list[int]:
        return self.staged_begins

    def spans(self, layer: int) -> tuple[PathSpans, int]:
        keys = self.rooms[layer].keys.data_ptr()
        if keys not in self._spans_by_room:
            places = [_place(self.rooms[layer], begin) for begin in self.begins]
            self._spans_by_room[keys] = PathSpans.at(places, self.pieces, self.rooms[layer].keys.shape[1])
        return self._spans_by_room[keys], 0

    def memory(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rooms[layer]

    @cached_property
    def _spans_by_room(self) -> dict[int, PathSpans]:
        return {}


def _place(room: KVMemory, begin: int) -> Place:
    """The place of a slot in a buffer, whose only layer is number 0."""
    keys, values = room.keys[begin:], room.values[begin:]
    return Place(keys.data_ptr(), values.data_ptr(), len(keys))


def _staged(chunk: Chunk, rooms: list[KVMemory], begins: Mapping[KVSlot, int]) -> Chunk:
    own_begins = [begins[piece.slot] for piece in chunk.pieces]
    return _StagedChunk(chunk.begin, chunk.end, chunk.pieces, chunk.device, rooms, own_begins)
