"""How a parameter's value is made from the bytes of a checkpoint: as a view if possible, otherwise as a copy.

This module knows no files and no modules: readers supply bytes, and binders take values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from bough.model.checkpoint.container import TensorPlace

STORED_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,  # powers of two
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
VALUE_DTYPES = ("BF16", "F16", "F32")  # dtypes whose values may be used directly
VALUE_ALIGNMENT = 64  # bytes: a cache line, which is also the widest SIMD vector


class Scratch(Protocol):
    """Allocates memory for values that are not views."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialised tensor."""

    def write(self, how: Callable[[], object]) -> None:
        """Fill the last allocation: now, and in reused memory again whenever the source bytes have been read again."""


class FreshMemory:
    """Scratch that allocates separate, permanent memory for each value."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialised tensor."""
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def write(self, how: Callable[[], object]) -> None:
        """Write the value once, now."""
        how()


class ReusedMemory:
    """Scratch in which each layer's values overwrite the previous layer's."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory  # (num_bytes,) uint8
        self._used, self._is_late = 0, False
        self.writes: list[Callable[[], object]] = []  # since `begin`, in order

    def begin(self, at: int = 0, is_late: bool = False) -> None:
        """Free everything beyond byte `at`. With `is_late`, values are not written when allocated."""
        self._used, self._is_late, self.writes = at, is_late, []

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialised tensor."""
        begin, self._used = self._used, self._used + room_bytes(shape, dtype)
        assert self._used <= len(self._memory), "a layer takes more memory than was planned"
        return self._memory[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def write(self, how: Callable[[], object]) -> None:
        """Record the write in `writes`, and call it unless it is late."""
        if not self._is_late:
            how()
        self.writes.append(how)


def room_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes that a value takes in a ReusedMemory."""
    return -(-math.prod(shape) * dtype.itemsize // VALUE_ALIGNMENT) * VALUE_ALIGNMENT


class TensorSource(Protocol):
    """Source of one parameter's value in a checkpoint."""

    @property
    def places(self) -> tuple[TensorPlace, ...]:
        """The tensors that the value is made from."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that `value` takes in a ReusedMemory."""

    def value(self, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
        """Make the value from the bytes of `places`, each (num_bytes,) uint8 on the value's device."""

    def as_stored(self, raw: Sequence[torch.Tensor], dtype: torch.dtype) -> Any:
        """The value in views of those bytes, a tensor or a `bough.model.packed.Packed`; None if it must be made."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as stored: a view of its bytes, or a converted copy."""

    place: TensorPlace
    keeps_dtype: bool = False  # the model's compute dtype does not matter
    is_by_rows = True  # any rows of the value can be made from the same rows of the tensor

    @property
    def places(self) -> tuple[TensorPlace, ...]:
        return (self.place,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """Scratch bytes of a converted copy; 0 if the value is a view of the tensor's bytes."""
        return 0 if self._is_view(dtype) else room_bytes(self.shape, dtype)

    def value(self, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
        """A view of the bytes, or a converted copy."""
        (data,) = raw
        if self._is_view(dtype):
            return typed(data, self.place)
        out = scratch.take(self.shape, dtype)
        scratch.write(lambda: self.write(data, out))
        return out

    def as_stored(self, raw: Sequence[torch.Tensor], dtype: torch.dtype) -> Any:
        return typed(raw[0], self.place) if self._is_view(dtype) and is_aligned(self.place) else None

    def write(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Convert the tensor's bytes to the dtype of `out`."""
        out.copy_(typed(data, self.place))

    def _is_view(self, dtype: torch.dtype) -> bool:
        return self.keeps_dtype or (STORED_DTYPES[self.place.dtype] == dtype and is_aligned(self.place))


@dataclass(frozen=True, slots=True)
class Joined:
    """Several values concatenated along the first axis, such as the halves of a fused projection."""

    parts: tuple[TensorSource, ...]

    @property
    def places(self) -> tuple[TensorPlace, ...]:
        return tuple(place for part in self.parts for place in part.places)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """Scratch bytes of the joined copy and of its parts."""
        return room_bytes(self.shape, dtype) + sum(part.scratch_bytes(dtype) for part in self.parts)

    def value(self, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
        """A concatenated copy."""
        whole, parts = scratch.take(self.shape, dtype), pieces(self, raw, dtype, scratch)
        scratch.write(lambda: torch.cat(parts, out=whole))
        return whole

    def as_stored(self, raw: Sequence[torch.Tensor], dtype: torch.dtype) -> Any:
        return None


@dataclass(frozen=True, slots=True)
class Transposed:
    """The transpose of a matrix."""

    matrix: TensorSource

    @property
    def places(self) -> tuple[TensorPlace, ...]:
        return self.matrix.places

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape[::-1]

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """Scratch bytes of the matrix; its transpose is a view."""
        return self.matrix.scratch_bytes(dtype)

    def value(self, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
        """A view of the matrix."""
        return self.matrix.value(raw, dtype, scratch).t()

    def as_stored(self, raw: Sequence[torch.Tensor], dtype: torch.dtype) -> Any:
        found = self.matrix.as_stored(raw, dtype)
        return found.t() if isinstance(found, torch.Tensor) else None


def pieces(
    source: TensorSource, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch
) -> list[torch.Tensor]:
    """The parts of a value along the first axis, without copying them together."""
    return [part.value(own, dtype, scratch) for part, own in parts_with_bytes(source, raw)]


def parts_with_bytes(
    source: TensorSource, raw: Sequence[torch.Tensor]
) -> Iterator[tuple[TensorSource, Sequence[torch.Tensor]]]:
    """The parts of a value along the first axis, each with the bytes of its places."""
    taken = 0
    for part in source.parts if isinstance(source, Joined) else (source,):
        end = taken + len(part.places)
        yield part, raw[taken:end]
        taken = end


def typed(data: torch.Tensor, place: TensorPlace) -> torch.Tensor:
    """View a tensor's bytes, (num_bytes,) uint8, in its dtype and shape; a copy if they are not aligned."""
    if not is_aligned(place):
        data = data.clone()  # safetensors does not guarantee alignment
    return data.view(STORED_DTYPES[place.dtype]).view(place.shape)


def parts_of(place: TensorPlace) -> list[TensorPlace]:
    """The parts of a stacked tensor along its first axis. Checksums cover whole tensors, so they have none."""
    count, *shape = place.shape
    size = place.num_bytes // count
    return [
        replace(place, name=f"{place.name}[{i}]", offset=place.offset + i * size, num_bytes=size, shape=tuple(shape))
        for i in range(count)
    ]


def row_blocks(place: TensorPlace, most_bytes: int) -> list[TensorPlace]:
    """Split a tensor by rows into parts of about `most_bytes`; a tensor without rows is one part."""
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


def is_aligned(place: TensorPlace) -> bool:
    """Whether the offset is aligned; slabs preserve offsets modulo a page."""
    return place.offset % STORED_DTYPES[place.dtype].itemsize == 0
