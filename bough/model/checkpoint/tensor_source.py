"""How a parameter's value comes out of the bytes of a checkpoint: a view where that is possible, otherwise made anew.

Knows no files and no modules: whoever reads gives the bytes, whoever binds takes the value.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from bough.model.checkpoint.checkpoint import TensorPlace

STORED_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
VALUE_DTYPES = ("BF16", "F16", "F32")  # in which a value can be stored as it is
VALUE_ALIGNMENT = 64  # bytes: a cache line, which is also the widest vector


class Scratch(Protocol):
    """Where values that are no views are made."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor."""
        ...

    def write(self, how: Callable[[], object]) -> None:
        """Has what was taken written to: now, and where memory is reused again whenever the bytes are there again."""
        ...


class FreshMemory:
    """Values that stay: each gets memory of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor."""
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def write(self, how: Callable[[], object]) -> None:
        """Once."""
        how()


class ReusedMemory:
    """Values of one layer after another in the same memory: those of a layer are gone when the next one begins."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory  # (num_bytes,) uint8
        self._used, self._is_late = 0, False
        self.writes: list[Callable[[], object]] = []  # since the beginning, in order

    def begin(self, at: int = 0, is_late: bool = False) -> None:
        """Gives everything back but what is before a byte. What is late is not written when it is made."""
        self._used, self._is_late, self.writes = at, is_late, []

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor."""
        begin, self._used = self._used, self._used + room_bytes(shape, dtype)
        assert self._used <= len(self._memory), "a layer takes more than was reckoned"
        return self._memory[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def write(self, how: Callable[[], object]) -> None:
        """Unless it is late; and keeps it in `writes`."""
        if not self._is_late:
            how()
        self.writes.append(how)


def room_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """What a value takes of a ReusedMemory."""
    return -(-math.prod(shape) * dtype.itemsize // VALUE_ALIGNMENT) * VALUE_ALIGNMENT


class TensorSource(Protocol):
    """One parameter's value, in terms of tensors of a checkpoint."""

    @property
    def places(self) -> tuple[TensorPlace, ...]:
        """The tensors that it is made of."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the value."""
        ...

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """What `value` takes of a ReusedMemory."""
        ...

    def value(self, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
        """From the bytes of `places`, each (num_bytes,) uint8 on the device where the value is wanted."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it is: a view of its bytes, or a converted copy."""

    place: TensorPlace

    @property
    def places(self) -> tuple[TensorPlace, ...]:
        return (self.place,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """Nothing for a view."""
        return 0 if self._is_view(dtype) else room_bytes(self.shape, dtype)

    def value(self, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
        """The tensor in another shape of memory, or converted."""
        (data,) = raw
        if self._is_view(dtype):
            return typed(data, self.place)
        out = scratch.take(self.shape, dtype)
        scratch.write(lambda: out.copy_(typed(data, self.place)))
        return out

    def _is_view(self, dtype: torch.dtype) -> bool:
        return STORED_DTYPES[self.place.dtype] == dtype and _is_aligned(self.place)


@dataclass(frozen=True, slots=True)
class Joined:
    """Several values one below the other along the first axis, such as the halves of a fused projection."""

    parts: tuple[TensorSource, ...]

    @property
    def places(self) -> tuple[TensorPlace, ...]:
        return tuple(place for part in self.parts for place in part.places)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """The whole and its parts."""
        return room_bytes(self.shape, dtype) + sum(part.scratch_bytes(dtype) for part in self.parts)

    def value(self, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
        """A copy."""
        whole, parts = scratch.take(self.shape, dtype), pieces(self, raw, dtype, scratch)
        scratch.write(lambda: torch.cat(parts, out=whole))
        return whole


def pieces(
    source: TensorSource, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch
) -> list[torch.Tensor]:
    """What stands below one another along the first axis of a value, without being copied together."""
    if not isinstance(source, Joined):
        return [source.value(raw, dtype, scratch)]
    found, taken = [], 0
    for part in source.parts:
        end = taken + len(part.places)
        found.append(part.value(raw[taken:end], dtype, scratch))
        taken = end
    return found


def typed(data: torch.Tensor, place: TensorPlace) -> torch.Tensor:
    """The bytes of a tensor, (num_bytes,) uint8, as what they are; a copy where they are not aligned."""
    if not _is_aligned(place):
        data = data.clone()  # safetensors does not promise alignment
    return data.view(STORED_DTYPES[place.dtype]).view(place.shape)


def row_blocks(place: TensorPlace, most_bytes: int) -> list[TensorPlace]:
    """A tensor's rows, in runs of about as many bytes as are allowed; one without rows in one piece."""
    num_rows = place.shape[0] if place.shape else 0
    if not num_rows or not place.num_bytes:
        return [place]
    row_bytes = place.num_bytes // num_rows
    step = max(1, most_bytes // row_bytes)
    blocks = []
    for begin in range(0, num_rows, step):
        count = min(step, num_rows - begin)
        offset, num_bytes = place.offset + begin * row_bytes, count * row_bytes
        blocks.append(replace(place, offset=offset, num_bytes=num_bytes, shape=(count, *place.shape[1:])))
    return blocks


def crc32(data: torch.Tensor, before: int = 0) -> int:
    """Checksum of bytes, (num_bytes,) uint8 on the CPU, that follow others with the checksum `before`."""
    return zlib.crc32(data.numpy(), before)  # type: ignore[arg-type]  # an array is a buffer


def _is_aligned(place: TensorPlace) -> bool:
    """Slabs keep what a file's offsets are modulo a page."""
    return place.offset % STORED_DTYPES[place.dtype].itemsize == 0
