"""KV in host memory, copied to the device layer by layer.

A device needs the KV of one layer at a time, so the KV of long contexts and many sessions may stay on the host. The
device has buffers for two layers: one is computed while the next is copied. Added rows are copied back. The sessions of
a sweep copy all their KV, in addition to the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from bough.model.batch.batch import Batch, Chunk
from bough.model.batch.path_spans import PathSpans, Place
from bough.model.kv.session_kv import KVMemory, KVShape, KVSlot
from bough.sizing.placement import STAGED_LAYERS
from target_worker.link.streams import DeviceEvent, DeviceStreams


class KVHome(Protocol):
    """Where a sweep finds its KV."""

    num_bytes: int  # copied between host and accelerator since the start

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


class OffloadedKV:
    """Device buffers for the KV of two layers of all slots in a sweep."""

    def __init__(self, shape: KVShape, num_rows: int, lanes: DeviceStreams) -> None:
        """`num_rows` is the total of all slots. `lanes` must not be used by others; the caller closes them."""
        self.num_bytes = 0
        self._num_layers = shape.num_layers
        self._lanes = lanes
        self._rooms = [_room(shape, num_rows, lanes) for _ in range(STAGED_LAYERS)]
        self._seats: dict[KVSlot, _Seat] = {}
        self._free: DeviceEvent | None = None  # when all earlier sweeps' use of the buffers has ended
        self._ready: list[DeviceEvent | None] = [None] * STAGED_LAYERS  # by buffer: when its next layer may be computed
        self._last: DeviceEvent | None = None  # end of the last queued copy

    @contextmanager
    def sweep(self, batch: Batch) -> Iterator[Batch]:
        """Place the slots one after another in the buffers."""
        self._seats = _seated(batch)
        self._free = self._lanes.compute_mark()  # the computation of an aborted sweep may still be queued
        self._bring(0)
        begins = {slot: seat.begin for slot, seat in self._seats.items()}
        try:
            yield batch.seen_as([_staged(chunk, self._rooms, begins) for chunk in batch.chunks])
        finally:
            if self._last is not None:
                self._last.synchronize()

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Copy the next layer while this one is computed."""
        ready = self._ready[index % STAGED_LAYERS]
        if ready is not None:
            self._lanes.compute_after(ready)
        if index + 1 < self._num_layers:
            self._bring(index + 1)
        yield
        self._take_back(index, self._lanes.compute_mark())

    def _bring(self, layer: int) -> None:
        """Queue copies of the rows that the slots already hold, after earlier use of the buffer."""
        room = self._rooms[layer % STAGED_LAYERS]
        for slot, (begin, first, _) in self._seats.items():
            if first:
                for held, staged in zip((slot.keys, slot.values), room, strict=True):
                    self._copy(held[layer, :first], staged[begin : begin + first], self._free)
        self._ready[layer % STAGED_LAYERS] = self._last

    def _take_back(self, layer: int, computed: DeviceEvent) -> None:
        """Queue copies of the rows that the sweep has added."""
        room = self._rooms[layer % STAGED_LAYERS]
        for slot, (begin, first, end) in self._seats.items():
            for held, staged in zip((slot.keys, slot.values), room, strict=True):
                self._copy(staged[begin + first : begin + end], held[layer, first:end], computed)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None) -> None:
        self.num_bytes += source.nbytes
        self._last = self._lanes.copy(source, target, after).done


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

    rooms: list[KVMemory]
    staged_begins: list[int]

    @property
    def begins(self) -> list[int]:
        return self.staged_begins

    def spans(self, layer: int) -> tuple[PathSpans, int]:
        return self._spans_by_room[layer % STAGED_LAYERS], 0

    def memory(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rooms[layer % STAGED_LAYERS]

    @cached_property
    def _spans_by_room(self) -> list[PathSpans]:
        num_kv_heads = self.rooms[0].keys.shape[1]
        places = ([_place(room, begin) for begin in self.begins] for room in self.rooms)
        return [PathSpans.at(own, self.pieces, num_kv_heads) for own in places]


def _place(room: KVMemory, begin: int) -> Place:
    """The place of a slot in a buffer, whose only layer is number 0."""
    keys, values = room.keys[begin:], room.values[begin:]
    return Place(keys.data_ptr(), values.data_ptr(), len(keys))


def _staged(chunk: Chunk, rooms: list[KVMemory], begins: Mapping[KVSlot, int]) -> Chunk:
    own_begins = [begins[piece.slot] for piece in chunk.pieces]
    return _StagedChunk(chunk.begin, chunk.end, chunk.pieces, chunk.device, rooms, own_begins)
