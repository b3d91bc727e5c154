"""Weights in 4 or 8 bits: bough's own packing, and what GPTQ and AWQ checkpoints hold. Knows no files.

Every format says the same thing: a weight is an integer times its group's scale, from a zero point on. That is reckoned
in float32 and rounded to the data type that is computed in: a packed model gives bit for bit what the same model with
its weights written out would give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch

from bough.errors import StreamError
from bough.model.checkpoint.checkpoint import TensorPlace
from bough.model.checkpoint.tensor_source import Scratch, room_bytes, typed
from bough.model.cpu.float_bits import from_half, rounded
from bough.model.cpu.jit import strict_parallel
from bough.model.gpu.kernels import kernels_on

_KERNEL_DTYPES = (torch.bfloat16, torch.float32)  # that the kernels below write; any other goes by way of torch

# What goes by way of torch goes in blocks: whole matrices in float32 would want several times a layer's memory.
BLOCK_ELEMENTS = 1 << 24
BLOCK_BYTES = 32  # at most, for each element of a block while it is made
BLOCK_ROWS = 32  # blocks are multiples of it, hence whole words of any packing


# Each kernel writes float32 to a float32 `out`, or bfloat16 to a uint16 one where `is_bf16`.


@strict_parallel
def _unpack4(packed, scales, out, is_bf16):  # type: ignore[no-untyped-def]
    """packed (rows, columns / 2) uint8, scales (2, rows, groups) float16's bits, out (rows, columns)."""
    _, rows, groups = scales.shape
    half = packed.shape[1] // groups
    for row in numba.prange(rows):
        for group in range(groups):
            scale, offset = from_half(scales[0, row, group]), from_half(scales[1, row, group])
            begin = 2 * half * group
            if is_bf16:
                for j in range(half):
                    byte = np.int32(packed[row, half * group + j])
                    out[row, begin + j] = rounded(np.float32(byte & 15) * scale + offset)
                    out[row, begin + half + j] = rounded(np.float32(byte >> 4) * scale + offset)
            else:
                for j in range(half):
                    byte = np.int32(packed[row, half * group + j])
                    out[row, begin + j] = np.float32(byte & 15) * scale + offset
                    out[row, begin + half + j] = np.float32(byte >> 4) * scale + offset


@strict_parallel
def _unpack8(packed, scales, out, is_bf16):  # type: ignore[no-untyped-def]
    """packed (rows, columns) int8, scales (1, rows, groups) float16's bits, out (rows, columns)."""
    _, rows, groups = scales.shape
    size = packed.shape[1] // groups
    for row in numba.prange(rows):
        for group in range(groups):
            scale, begin = from_half(scales[0, row, group]), size * group
            if is_bf16:
                for j in range(size):
                    out[row, begin + j] = rounded(np.float32(packed[row, begin + j]) * scale)
            else:
                for j in range(size):
                    out[row, begin + j] = np.float32(packed[row, begin + j]) * scale


@strict_parallel
def _unpack_words_down(words, zeros, scales, groups, bits, out, is_bf16):  # type: ignore[no-untyped-def]
    """GPTQ: words (inputs / per word, outputs) int32, zeros and scales (groups, outputs) float32, groups (inputs,)."""
    num_inputs, num_outputs = out.shape
    per_word, mask = 32 // bits, np.int32((1 << bits) - 1)
    for k in numba.prange(num_inputs):
        word, shift, group = k // per_word, np.int32(bits * (k % per_word)), groups[k]
        if is_bf16:
            for n in range(num_outputs):
                integer = np.float32((words[word, n] >> shift) & mask)
                out[k, n] = rounded((integer - zeros[group, n]) * scales[group, n])
        else:
            for n in range(num_outputs):
                integer = np.float32((words[word, n] >> shift) & mask)
                out[k, n] = (integer - zeros[group, n]) * scales[group, n]


@strict_parallel
def _unpack_words_across(words, zeros, scales, group_size, out, is_bf16):  # type: ignore[no-untyped-def]
    """AWQ: words (inputs, outputs / 8) int32, zeros and scales (groups, outputs) float32, out (inputs, outputs)."""
    num_inputs, num_words = words.shape
    for k in numba.prange(num_inputs):
        group = k // group_size
        for word in range(num_words):
            for c in range(8):
                n = 8 * word + c
                integer = np.float32((words[k, word] >> np.int32(4 * (c // 2 + 4 * (c % 2)))) & np.int32(15))
                value = (integer - zeros[group, n]) * scales[group, n]
                if is_bf16:
                    out[k, n] = rounded(value)
                else:
                    out[k, n] = value


def _write(
    out: torch.Tensor, kernel: Callable[..., None], by_torch: Callable[[slice], torch.Tensor], *inputs: object
) -> None:
    """Fills `out` by a kernel where there is one, otherwise from what `by_torch` gives in float32 for some rows."""
    if out.device.type != "cpu" or out.dtype not in _KERNEL_DTYPES:
        step = max(BLOCK_ELEMENTS // out.shape[1] // BLOCK_ROWS, 1) * BLOCK_ROWS
        for begin in range(0, len(out), step):
            rows = slice(begin, min(begin + step, len(out)))
            out[rows] = by_torch(rows)
        return
    is_bf16 = out.dtype == torch.bfloat16
    target = out.view(torch.uint16) if is_bf16 else out
    kernel(*(_array(x) if isinstance(x, torch.Tensor) else x for x in inputs), target.numpy(), is_bf16)


def _array(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """For kernels, which take float16 as its bits."""
    return (values.view(torch.uint16) if values.dtype == torch.float16 else values).numpy()


@dataclass(frozen=True, slots=True)
class Packed:
    """bough's own: integers in groups along each row; in 8 bits signed, in 4 bits from 0 to 15, from an offset on.

    In 4 bits a byte holds elements j and j + group / 2 of its group: a group unpacks into two runs.
    """

    packed: TensorPlace  # (rows, columns / 2) U8, or (rows, columns) I8
    scales: TensorPlace  # (1, rows, groups) F16, or in 4 bits (2, rows, groups): scales, then offsets
    bits: int

    @property
    def places(self) -> tuple[TensorPlace, ...]:
        return (self.packed, self.scales)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.packed.shape[0], self.packed.shape[1] * 8 // self.bits)

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """The whole value."""
        return room_bytes(self.shape, dtype)

    def value(self, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
        """Written out."""
        out = scratch.take(self.shape, dtype)
        scratch.write(lambda: self._write(raw, out))
        return out

    def _write(self, raw: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        packed, scales = typed(raw[0], self.packed), typed(raw[1], self.scales)
        if kernels := kernels_on(out.device):
            kernels.write_own(packed, scales, self.bits, out)
            return
        kernel = _unpack4 if self.bits == 4 else _unpack8
        _write(out, kernel, lambda rows: self._by_torch(packed[rows], scales[:, rows]), packed, scales)

    def _by_torch(self, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        (_, rows, groups), scales = scales.shape, scales.float()
        integers = packed.view(rows, groups, -1)
        if self.bits == 8:
            return (integers.float() * scales[0, :, :, None]).view(rows, -1)
        integers = torch.cat((integers & 15, integers >> 4), dim=2)
        return (integers.float() * scales[0, :, :, None] + scales[1, :, :, None]).view(rows, -1)


@dataclass(frozen=True, slots=True)
class Gptq:
    """What AutoGPTQ and GPTQModel write: integers packed along the inputs, the weight transposed."""

    words: TensorPlace  # qweight (inputs / per word, outputs) I32
    zeros: TensorPlace  # qzeros (groups, outputs / per word) I32
    scales: TensorPlace  # (groups, outputs) F16
    groups: TensorPlace | None  # g_idx (inputs,) I32: the group of each input, where they are not in order
    bits: int
    zero_offset: int  # 1 where the file holds zero - 1, as the first version of the format does

    @property
    def places(self) -> tuple[TensorPlace, ...]:
        return (self.words, self.zeros, self.scales, *((self.groups,) if self.groups else ()))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.words.shape[1], self.words.shape[0] * 32 // self.bits)

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """The whole value."""
        return room_bytes(self.shape, dtype)

    def value(self, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
        """Written out, as the transpose of a matrix that is in order."""
        num_outputs, num_inputs = self.shape
        out = scratch.take((num_inputs, num_outputs), dtype)
        scratch.write(lambda: self._write(raw, out))
        return out.t()

    def _write(self, raw: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        if kernels := kernels_on(out.device):
            words, zeros, scales, *groups = (typed(*part) for part in zip(raw, self.places, strict=True))
            kernels.write_down(words, zeros, scales, groups[0] if groups else None, self.bits, self.zero_offset, out)
            return
        self._write_without(raw, out)

    def _write_without(self, raw: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """On the CPU, and by way of torch."""
        words, scales = typed(raw[0], self.words), typed(raw[2], self.scales).float()
        shifts = torch.arange(0, 32, self.bits, device=words.device, dtype=torch.int32)
        mask, num_inputs = (1 << self.bits) - 1, len(out)
        zeros = (typed(raw[1], self.zeros)[:, :, None] >> shifts & mask).flatten(1).float() + self.zero_offset
        groups = (
            self._checked(typed(raw[3], self.groups))
            if self.groups
            else torch.arange(num_inputs, device=words.device, dtype=torch.int32) // (num_inputs // len(scales))
        )

        def by_torch(rows: slice) -> torch.Tensor:
            some = words[rows.start * self.bits // 32 : -(-rows.stop * self.bits // 32)]
            integers = (some[:, None, :] >> shifts[:, None] & mask).flatten(0, 1).float()
            return (integers - zeros[groups[rows].long()]) * scales[groups[rows].long()]

        _write(out, _unpack_words_down, by_torch, words, zeros, scales, groups, self.bits)

    def _checked(self, groups: torch.Tensor) -> torch.Tensor:
        """Kernels take groups at their word, and a file may have changed since it was opened."""
        num_groups = self.scales.shape[0]
        if groups.device.type == "cpu" and not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
            raise StreamError(f"{self.words.file}: g_idx of {self.words.name} names groups beyond its {num_groups}")
        return groups


@dataclass(frozen=True, slots=True)
class Awq:
    """What AutoAWQ writes (its "gemm" version): integers packed along the outputs in an order of its own."""

    words: TensorPlace  # qweight (inputs, outputs / 8) I32
    zeros: TensorPlace  # qzeros (groups, outputs / 8) I32
    scales: TensorPlace  # (groups, outputs) F16

    @property
    def places(self) -> tuple[TensorPlace, ...]:
        return (self.words, self.zeros, self.scales)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.words.shape[1] * 8, self.words.shape[0])

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """The whole value."""
        return room_bytes(self.shape, dtype)

    def value(self, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
        """Written out, as the transpose of a matrix that is in order."""
        num_outputs, num_inputs = self.shape
        out = scratch.take((num_inputs, num_outputs), dtype)
        scratch.write(lambda: self._write(raw, out))
        return out.t()

    def _write(self, raw: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        if kernels := kernels_on(out.device):
            kernels.write_across(*(typed(*part) for part in zip(raw, self.places, strict=True)), out)
            return
        words, scales = typed(raw[0], self.words), typed(raw[2], self.scales).float()
        zeros, group_size = _awq_integers(typed(raw[1], self.zeros)), len(out) // len(scales)

        def by_torch(rows: slice) -> torch.Tensor:
            groups = torch.arange(rows.start, rows.stop, device=words.device) // group_size
            return (_awq_integers(words[rows]) - zeros[groups]) * scales[groups]

        _write(out, _unpack_words_across, by_torch, words, zeros, scales, group_size)


def _awq_integers(words: torch.Tensor) -> torch.Tensor:
    """(rows, n / 8) int32 to (rows, n) float32: column c of eight stands at nibble c / 2, the odd ones four further."""
    column = torch.arange(8, device=words.device, dtype=torch.int32)  # made there: a copy would stop the sweep
    nibbles = column // 2 + 4 * (column % 2)
    return ((words[:, :, None] >> (4 * nibbles)) & 15).flatten(1).float()
