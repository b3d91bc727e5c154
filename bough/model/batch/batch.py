"""A packed batch: tokens of several sessions' contexts and trees as rows of one model pass."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from bough.model.batch.path_spans import BatchPart, IntArray, Paths, PathSpans
from bough.model.kv.slot import Segment
from bough.sizing.row_counts import RowCounts

__all__ = ["Batch", "BatchPart", "Chunk", "Segment"]


@dataclass(frozen=True)
class Chunk:
    """Rows that a layer computes together. Their slots must not move meanwhile."""

    begin: int  # first row in the batch
    end: int
    pieces: tuple[BatchPart, ...]
    device: torch.device

    @property
    def num_tokens(self) -> int:
        """Number of rows that are not padding."""
        return self.pieces[-1].span.stop

    def spans(self, layer: int) -> tuple[PathSpans, int]:
        """The pieces for compiled code on a CPU, and the layer's number there."""
        return self._spans, layer

    def paths_on(self, device: torch.device) -> Paths:
        """The pieces, in rows of `memory`, for a device that has layers; sent there once."""
        if device not in self._paths:
            self._paths[device] = self.paths_on_host().on(device)
        return self._paths[device]

    @cached_property
    def _paths(self) -> dict[torch.device, Paths]:
        return {}

    def paths_on_host(self) -> Paths:
        """The paths before they are sent to a device."""
        return Paths.of(self.pieces, self.begins)

    @property
    def begins(self) -> Sequence[int]:
        """First row in `memory` of each piece's slot."""
        return [piece.slot.begin for piece in self.pieces]

    def memory(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, (num_rows, num_kv_heads, head_dim) each, which contain all slots."""
        memory = self.pieces[0].slot.memory
        assert all(piece.slot.memory is memory for piece in self.pieces), "slots of one arena go into one chunk"
        return memory.keys[layer], memory.values[layer]

    def slots(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of a layer for each piece, from its slot's first row on."""
        slots = [piece.slot for piece in self.pieces]
        return [(slot.memory.keys[layer][slot.begin :], slot.memory.values[layer][slot.begin :]) for slot in slots]

    @cached_property
    def _spans(self) -> PathSpans:
        return PathSpans.of(self.pieces)


class Batch:
    """Concatenated segments, padded, in chunks that go through each layer one after another.

    A reproducible batch has chunks of the sizes that `bough.model.running.batch_invariance` allows; with `rows=None`
    there is one chunk without padding.
    """

    def __init__(self, segments: Sequence[Segment], rows: RowCounts | None, device: torch.device) -> None:
        self.segments = tuple(segment for segment in segments if len(segment))
        self.num_tokens = sum(map(len, self.segments))
        counts = rows or RowCounts(self.num_tokens, self.num_tokens)
        self.num_rows = counts.padded(self.num_tokens)
        self._device = device
        begins = range(0, self.num_rows, counts.most)
        self.chunks = tuple(self._chunk(begin, min(begin + counts.most, self.num_rows)) for begin in begins)

    def send(self, elsewhere: Collection[torch.device] = ()) -> None:
        """Send attention's inputs to devices, before work is queued there that the copies would wait for."""
        for device in (self._device, *elsewhere) if self._device.type != "cpu" else elsewhere:
            for chunk in self.chunks:
                chunk.paths_on(device)

    def seen_as(self, chunks: Sequence[Chunk]) -> Batch:
        """A batch of the same rows with replaced chunks, one for each, whose keys and values are elsewhere."""
        other = copy.copy(self)
        other.chunks = tuple(chunks)
        return other

    @property
    def tokens(self) -> IntArray:
        """(num_tokens,) of all segments."""
        return np.concatenate([segment.tokens for segment in self.segments])

    @property
    def positions(self) -> IntArray:
        """(num_tokens,) of all segments."""
        return np.concatenate([segment.positions for segment in self.segments])

    @property
    def wanted_rows(self) -> NDArray[np.int64]:
        """Rows that want logits, (num_logit_rows,)."""
        return np.flatnonzero(np.repeat([s.wants_logits for s in self.segments], [len(s) for s in self.segments]))

    @cached_property
    def input_ids(self) -> torch.Tensor:
        """(1, num_rows) int64 on the device."""
        return self._padded(self.tokens)

    @property
    def host_ids(self) -> torch.Tensor:
        """`input_ids` on the host."""
        return torch.from_numpy(self._filled(self.tokens))

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """(1, num_rows) int64 on the device."""
        return self._padded(self.positions)

    @cached_property
    def logit_rows(self) -> torch.Tensor:
        """`wanted_rows` on the device."""
        return torch.from_numpy(self.wanted_rows).to(self._device)

    @property
    def all_want_logits(self) -> bool:
        """Whether every token wants logits."""
        return all(segment.wants_logits for segment in self.segments)

    def _padded(self, numbers: IntArray) -> torch.Tensor:
        return torch.from_numpy(self._filled(numbers)).to(self._device)

    def _filled(self, numbers: IntArray) -> NDArray[np.int64]:
        padded = np.zeros((1, self.num_rows), dtype=np.int64)
        padded[0, : self.num_tokens] = numbers
        return padded

    def _chunk(self, begin: int, end: int) -> Chunk:
        pieces, offset = [], 0
        for segment in self.segments:
            first, last = max(begin, offset), min(end, offset + len(segment))
            if first < last:
                pieces.append(BatchPart(first - begin, segment.part(first - offset, last - offset)))
            offset += len(segment)
        return Chunk(begin, end, tuple(pieces), self._device)
