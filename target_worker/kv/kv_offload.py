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
from typing import NamedTuple, cast

import torch

from bough.model.batch.batch import Batch, Chunk
from bough.model.batch.path_spans import PathSpans, Place
from bough.model.kv.session_kv import KVMemory, KVShape, KVSlot, SplitLayers
from bough.runtime.host_memory import in_pieces
from bough.sizing.placement import STAGED_LAYERS
from target_worker.link.host_layers import PIECE_BYTES
from target_worker.link.streams import DeviceEvent, DeviceStreams


class KVHome:
    """Where a sweep finds its KV: in the slots themselves."""

    @property
    def num_bytes(self) -> int:
        """Bytes copied between host and devices since the start."""
        return 0

    def sweep(self, batch: Batch) -> AbstractContextManager[Batch]:
        """Yield the batch with its KV where layers read it; when the block ends, slots hold the added rows."""
        return nullcontext(batch)

    def layer(self, index: int) -> AbstractContextManager[None]:
        """A layer's attention must be queued within the block; layers come in order from 0."""
        return nullcontext()


class _BufferRows(NamedTuple):
    """The rows of a slot in the device buffers, and the ones that the sweep writes."""

    begin: int  # first row in the buffer
    first: int  # first slot row that the sweep writes; earlier rows are copied to the device
    end: int  # rows `first` to `end` are copied back


class _Stage:
    """A device's buffers for the KV of two of its layers, of all slots in a sweep."""

    def __init__(self, shape: KVShape, num_rows: int, streams: DeviceStreams, layers: Sequence[int]) -> None:
        """`layers` are those that the device computes, in order."""
        self.num_bytes = 0  # copied since the start
        self.layers = tuple(layers)
        self.buffers = [_buffer(shape, num_rows, streams) for _ in range(STAGED_LAYERS)]
        self.buffer_of = {layer: place % STAGED_LAYERS for place, layer in enumerate(layers)}
        self._next = dict(pairwise(layers))
        self._streams = streams
        self._rows_of: Mapping[KVSlot, _BufferRows] = {}
        self._free: DeviceEvent | None = None  # the end of earlier sweeps' use of the buffers
        self._ready: list[DeviceEvent | None] = [None] * STAGED_LAYERS  # by buffer: when its next layer may be computed
        self._last: DeviceEvent | None = None  # end of the last queued copy

    def begin(self, rows_of: Mapping[KVSlot, _BufferRows]) -> None:
        """Start a sweep: copy the first layer."""
        self._rows_of = rows_of
        self._free = self._streams.compute_event()  # the computation of an aborted sweep may still be queued
        self._copy_in(self.layers[0])

    def end(self) -> None:
        """Wait until the slots hold the added rows."""
        if self._last is not None:
            self._last.synchronize()

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Copy the device's next layer while this one is computed."""
        ready = self._ready[self.buffer_of[index]]
        if ready is not None:
            self._streams.compute_after(ready)
        if index in self._next:
            self._copy_in(self._next[index])
        yield
        self._copy_out(index, self._streams.compute_event())

    def _copy_in(self, layer: int) -> None:
        """Queue copies of the rows that are already in the slots, after earlier use of the buffer."""
        buffer = self.buffers[self.buffer_of[layer]]
        for slot, (begin, first, _) in self._rows_of.items():
            if first:
                for held, staged in zip((slot.keys, slot.values), buffer, strict=True):
                    self._copy(held[layer, :first], staged[begin : begin + first], self._free)
        self._ready[self.buffer_of[layer]] = self._last

    def _copy_out(self, layer: int, computed: DeviceEvent) -> None:
        """Queue copies of the rows that the sweep has added."""
        buffer = self.buffers[self.buffer_of[layer]]
        for slot, (begin, first, end) in self._rows_of.items():
            for held, staged in zip((slot.keys, slot.values), buffer, strict=True):
                self._copy(staged[begin + first : begin + end], held[layer, first:end], computed)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None) -> None:
        self.num_bytes += source.nbytes
        self._last = self._streams.copy(source, target, after).done


class OffloadedKV(KVHome):
    """A stage for each device that computes layers."""

    def __init__(
        self,
        shape: KVShape,
        num_rows: int,
        streams: DeviceStreams,
        elsewhere: Mapping[int, DeviceStreams] | None = None,
    ) -> None:
        """`num_rows` is the total of all slots; `elsewhere` has the streams of layers on other devices.

        No streams may be used by others; the caller closes them.
        """
        by_streams = _layers_by(shape, streams, elsewhere or {})
        self._stages = [_Stage(shape, num_rows, own, layers) for own, layers in by_streams.items()]
        self._stage_of = {layer: stage for stage in self._stages for layer in stage.layers}

    @property
    def num_bytes(self) -> int:
        return sum(stage.num_bytes for stage in self._stages)

    @contextmanager
    def sweep(self, batch: Batch) -> Iterator[Batch]:
        """Place the slots one after another in the buffers, in the same rows on every device."""
        rows_of = _assign_rows(batch)
        for stage in self._stages:
            stage.begin(rows_of)
        begins, buffers = {slot: assigned.begin for slot, assigned in rows_of.items()}, self._buffers
        try:
            yield batch.seen_as([_staged(chunk, buffers, begins) for chunk in batch.chunks])
        finally:
            for stage in self._stages:
                stage.end()

    def layer(self, index: int) -> AbstractContextManager[None]:
        """Compute a layer on the stage of its device."""
        return self._stage_of[index].layer(index)

    @property
    def _buffers(self) -> list[KVMemory]:
        """The buffer of each layer."""
        of = (self._stage_of[layer] for layer in range(len(self._stage_of)))
        return [stage.buffers[stage.buffer_of[layer]] for layer, stage in enumerate(of)]


def memory_on_host(
    shape: KVShape, num_rows: int, streams: DeviceStreams, elsewhere: Mapping[int, DeviceStreams] | None = None
) -> KVMemory:
    """Allocate host memory for the KV of `num_rows` tokens, each layer's near the device that computes it.

    Memory is pinned in pieces of whole layers, like that of weights: if CUDA refuses one, the others stay pinned.
    """
    layers_by = _layers_by(shape, streams, elsewhere or {})
    return KVMemory(*(_in_pieces(shape, size, layers_by) for size in shape.sizes(num_rows)))


def _layers_by(
    shape: KVShape, streams: DeviceStreams, elsewhere: Mapping[int, DeviceStreams]
) -> dict[DeviceStreams, list[int]]:
    found: dict[DeviceStreams, list[int]] = {}
    for layer in range(shape.num_layers):
        found.setdefault(elsewhere.get(layer, streams), []).append(layer)
    return found


def _in_pieces(shape: KVShape, whole: Sequence[int], layers_by: Mapping[DeviceStreams, Sequence[int]]) -> torch.Tensor:
    """Allocate the keys, or the values, whose shape is `whole`."""
    _, *size = whole
    layer_bytes = math.prod(size) * shape.dtype.itemsize
    parts, places = list[torch.Tensor](), dict[int, tuple[int, int]]()
    for streams, layers in layers_by.items():
        left = iter(layers)
        for run in in_pieces([layer_bytes] * len(layers), PIECE_BYTES):
            memory = streams.host_memory(sum(run))[: sum(run)]
            places |= {next(left): (len(parts), number) for number in range(len(run))}
            parts.append(torch.frombuffer(memory, dtype=shape.dtype).view(len(run), *size))
    return cast(torch.Tensor, SplitLayers(parts, [places[layer] for layer in range(shape.num_layers)]))


def _buffer(shape: KVShape, num_rows: int, streams: DeviceStreams) -> KVMemory:
    """A buffer for one layer's keys and values, (num_rows, num_kv_heads, head_dim) each."""
    sizes = [size for _, *size in shape.sizes(num_rows)]
    memory = (streams.device_memory(math.prod(size) * shape.dtype.itemsize) for size in sizes)
    return KVMemory(*(room.view(shape.dtype).view(size) for room, size in zip(memory, sizes, strict=True)))


def _assign_rows(batch: Batch) -> dict[KVSlot, _BufferRows]:
    """Assign buffer rows to every slot. A sweep writes the rows that follow those which a slot holds."""
    reach: dict[KVSlot, tuple[int, int]] = {}
    for segment in batch.segments:
        slot = segment.slot
        assert isinstance(slot, KVSlot), "there are keys to be copied"
        first, end = reach.get(slot, (slot.num_rows, 0))
        reach[slot] = min(first, int(segment.rows.min())), max(end, int(segment.rows.max()) + 1)
    rows_of, begin = {}, 0
    for slot, (first, end) in reach.items():
        rows_of[slot] = _BufferRows(begin, first, end)
        begin += end
    return rows_of


@dataclass(frozen=True)
class _StagedChunk(Chunk):
    """Rows whose keys and values are in the device buffers."""

    buffers: list[KVMemory]  # by layer
    staged_begins: list[int]

    @property
    def begins(self) -> list[int]:
        return self.staged_begins

    def slots(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        keys, values = self.memory(layer)
        return [(keys[begin:], values[begin:]) for begin in self.begins]

    def spans(self, layer: int) -> tuple[PathSpans, int]:
        keys = self.buffers[layer].keys.data_ptr()
        if keys not in self._spans_by_buffer:
            places = [_place(self.buffers[layer], begin) for begin in self.begins]
            self._spans_by_buffer[keys] = PathSpans.at(places, self.pieces, self.buffers[layer].keys.shape[1])
        return self._spans_by_buffer[keys], 0

    def memory(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.buffers[layer]

    @cached_property
    def _spans_by_buffer(self) -> dict[int, PathSpans]:
        return {}


def _place(buffer: KVMemory, begin: int) -> Place:
    """The place of a slot in a buffer, whose only layer is number 0."""
    keys, values = buffer.keys[begin:], buffer.values[begin:]
    return Place(keys.data_ptr(), values.data_ptr(), len(keys))


def _staged(chunk: Chunk, buffers: list[KVMemory], begins: Mapping[KVSlot, int]) -> Chunk:
    own_begins = [begins[piece.slot] for piece in chunk.pieces]
    return _StagedChunk(chunk.begin, chunk.end, chunk.pieces, chunk.device, buffers, own_begins)
