"""Unpacks quantized matrices on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from bough.model.cpu.float_bits import from_half, put_number
from bough.model.cpu.jit import strict_inline, strict_parallel
from bough.model.packed import Across, Along, Down, InBlocks, Packed, parts_of
from bough.model.quant.ggml_blocks import BlockType, Numbers
from bough.model.quant.scaled import E2M1

PART_WEIGHTS = 2**24  # with numbers by rows, for which scales and zeros in float32 may take half a byte each


def write(matrix: Packed, out: torch.Tensor) -> None:
    """`Backend.write`."""
    if isinstance(matrix, Down):
        write_down(matrix, out.t())
    elif isinstance(matrix, Across):
        write_across(matrix, out.t())
    elif isinstance(matrix, Along):
        for outputs, part in parts_of(matrix, PART_WEIGHTS):
            write_along(part, out[outputs])
    else:
        write_blocks(matrix, out)


def write_down(matrix: Down, out: torch.Tensor) -> None:
    """Unpack to `out` (inputs, outputs); group indices must be in range."""
    words, zeros, scales, groups, bits, zero_offset = matrix
    shifts, mask = torch.arange(0, 32, bits, dtype=torch.int32), (1 << bits) - 1
    offsets = (zeros[:, :, None] >> shifts & mask).flatten(1).float() + zero_offset
    if groups is None:
        groups = torch.arange(len(out), dtype=torch.int32) // (len(out) // len(scales))
    write_out(out, _unpack_words_down, words, offsets, scales.float(), groups, bits)


@strict_parallel
def _unpack_words_down(words: Any, zeros: Any, scales: Any, groups: Any, bits: Any, out: Any) -> Any:
    """Dequantize words (inputs / per word, outputs) int32 by zeros and scales (groups, outputs), groups (inputs,)."""
    num_inputs, num_outputs = out.shape
    per_word, mask = 32 // bits, np.int32((1 << bits) - 1)
    for k in numba.prange(num_inputs):
        word, shift, group = k // per_word, np.int32(bits * (k % per_word)), groups[k]
        for n in range(num_outputs):
            integer = np.float32((words[word, n] >> shift) & mask)
            put_number(out, (k, n), (integer - zeros[group, n]) * scales[group, n])


def write_across(matrix: Across, out: torch.Tensor) -> None:
    """Unpack to `out` (inputs, outputs)."""
    words, zeros, scales = matrix
    write_out(out, _unpack_words_across, words, _integers(zeros), scales.float(), len(out) // len(scales))


def _integers(words: torch.Tensor) -> torch.Tensor:
    """Unpack (rows, n / 8) int32 to (rows, n) float32: column c of eight is at nibble c / 2, plus 4 if c is odd."""
    column = torch.arange(8, dtype=torch.int32)
    nibbles = column // 2 + 4 * (column % 2)
    return ((words[:, :, None] >> (4 * nibbles)) & 15).flatten(1).float()


@strict_parallel
def _unpack_words_across(words: Any, zeros: Any, scales: Any, group_size: Any, out: Any) -> Any:
    """Dequantize words (inputs, outputs / 8) int32 by zeros and scales (groups, outputs) to out (inputs, outputs)."""
    num_inputs, num_words = words.shape
    for k in numba.prange(num_inputs):
        group = k // group_size
        for word in range(num_words):
            for c in range(8):
                n = 8 * word + c
                integer = np.float32((words[k, word] >> np.int32(4 * (c // 2 + 4 * (c % 2)))) & np.int32(15))
                put_number(out, (k, n), (integer - zeros[group, n]) * scales[group, n])


def write_along(matrix: Along, out: torch.Tensor) -> None:
    """Unpack to `out` (outputs, inputs)."""
    numbers, _, zeros, groups, bits, block, *_ = matrix
    scales = matrix.joined_scales()
    (num_outputs, num_inputs), (height, width) = out.shape, block
    rows_of = torch.arange(num_outputs) // height
    middle = 1 << (bits - 1) if numbers.dtype == torch.int32 else 0
    zero = _unpacked(zeros.t(), bits).t() if zeros is not None else scales.new_full((1, 1), middle)
    zero = zero[:num_outputs].float().expand(num_outputs, scales.shape[1]).contiguous()
    places = torch.arange(num_inputs) // width if groups is None else groups.long()
    places = places.clamp(0, scales.shape[1] - 1)  # the file may have changed, and kernels rely on this
    table = _table(numbers.dtype)
    write_out(out, _unpack_along, numbers.view(torch.uint8), table, zero, scales, rows_of, places, bits)


@strict_parallel
def _unpack_along(
    numbers: Any, table: Any, zeros: Any, scales: Any, row_of: Any, group_of: Any, bits: Any, out: Any
) -> Any:
    """Dequantize numbers (outputs, inputs * bits / 8) uint8, of the values in table (256,), to out (outputs, inputs).

    Their zeros are (outputs, groups), their scales (blocks of outputs, groups), by row_of and group_of.
    """
    num_outputs, num_inputs = out.shape
    is_half, mask = np.uint64(bits == 4), np.uint64((1 << bits) - 1)
    for n in numba.prange(num_outputs):
        own, own_zeros, own_scales, target = numbers[n], zeros[n], scales[row_of[n]], out[n]
        for i in range(num_inputs):
            k = np.uint64(i)  # unsigned: otherwise each index is checked for being negative
            number = (np.uint64(own[k >> is_half]) >> (np.uint64(4) * (k & is_half))) & mask
            group = np.uint64(group_of[k])
            put_number(target, k, (table[number] - own_zeros[group]) * own_scales[group])


def _table(dtype: torch.dtype) -> torch.Tensor:
    """The value of each number, by its bits: (256,) float32, of which 4 bits use the first 16."""
    if dtype == torch.uint8:
        return torch.tensor(E2M1).repeat(16)
    numbers = torch.arange(256, dtype=torch.uint8)
    return (numbers if dtype == torch.int32 else numbers.view(dtype)).float()


def _unpacked(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """The bits of each number of a matrix (rows, n), uint8."""
    bytes_ = numbers.contiguous().view(torch.uint8)
    return bytes_ if bits == 8 else torch.stack((bytes_ & 15, bytes_ >> 4), dim=2).flatten(1)


def write_blocks(matrix: InBlocks, out: torch.Tensor) -> None:
    """Unpack to `out` (outputs, inputs)."""
    data, size, type_, half = matrix
    tables = _BlockLayout.of(type_, size)
    arrays = [array for table in tables[:3] for array in table]
    write_out(out, _unpack_blocks, data, *arrays, tables.layout, half)


class _NumberLayout(NamedTuple):
    """The places of one kind of numbers in a block (`Numbers`), as arrays for compiled code."""

    places: Any  # (count, 4) int64: bytes and shifts of low and high bits
    constants: Any  # (5 or more,) int64: masks of low and high bits, number of low bits, flip, center, codes

    @classmethod
    def of(cls, numbers: Numbers, count: int) -> _NumberLayout:
        j, columns = np.arange(count), []
        for part in (numbers.low, numbers.high):
            columns.append(part.first + j // part.span * part.stride + j % part.width)
            columns.append(part.start + j % part.span // part.every * part.step)
        masks = [(1 << part.bits) - 1 for part in (numbers.low, numbers.high)]
        constants = np.array([*masks, numbers.low.bits, numbers.flip, numbers.center, *numbers.codes])
        return cls(np.stack(columns, 1), constants)


class _BlockLayout(NamedTuple):
    """The places of all kinds of numbers in blocks of a type, as arrays for compiled code."""

    numbers: _NumberLayout
    scales: _NumberLayout
    mins: _NumberLayout
    layout: Any  # (5,) int64: bytes of a block, byte of its scale, of its offset, whether it has scales, minima

    @classmethod
    @cache
    def of(cls, type_: BlockType, size: tuple[int, int]) -> _BlockLayout:
        count, num_bytes = size
        layout = [num_bytes, type_.scale, type_.offset, type_.scales.low.bits, type_.mins.low.bits]
        scales, mins = (_NumberLayout.of(numbers, type_.num_groups) for numbers in (type_.scales, type_.mins))
        return cls(_NumberLayout.of(type_.numbers, count), scales, mins, np.array(layout))


@strict_inline
def _number(block: Any, places: Any, constants: Any, j: Any) -> Any:
    low = (np.int64(block[places[j, 0]]) >> places[j, 1]) & constants[0]
    high = (np.int64(block[places[j, 2]]) >> places[j, 3]) & constants[1]
    number = ((low | (high << constants[2])) ^ constants[3]) - constants[4]
    return np.float32(constants[5 + number] if len(constants) > 5 else number)


@strict_inline
def _half(block: Any, at: Any) -> Any:
    return from_half(np.uint16(block[at]) | (np.uint16(block[at + 1]) << np.uint16(8)))


@strict_parallel
def _unpack_blocks(
    data: Any, numbers: Any, of_numbers: Any, scales: Any, of_scales: Any, mins: Any, of_mins: Any, layout: Any,
    half: Any, out: Any,
) -> Any:  # fmt: skip
    """Dequantize data (rows, bytes of a row) uint8 by the arrays of `_BlockLayout` to out (rows, columns)."""
    num_bytes, scale_at, offset_at, has_scales, has_mins = layout[0], layout[1], layout[2], layout[3], layout[4]
    num_groups, size = len(scales), len(numbers) // len(scales)
    for row in numba.prange(len(out)):
        within = row % (2 * half)
        source, target = data[row - within + 2 * (within % half) + within // half], out[row]
        for number in range(len(source) // num_bytes):
            block, begin = source[number * num_bytes : (number + 1) * num_bytes], number * len(numbers)
            for group in range(num_groups):
                scale, offset = _half(block, scale_at), np.float32(0)
                if has_scales:
                    scale *= _number(block, scales, of_scales, group)
                if offset_at >= 0:
                    offset = _half(block, offset_at)
                    if has_mins:
                        offset *= -_number(block, mins, of_mins, group)
                for j in range(group * size, (group + 1) * size):
                    value = scale * _number(block, numbers, of_numbers, j)
                    if offset_at >= 0:
                        value += offset
                    put_number(target, begin + j, value)


def write_out(out: torch.Tensor, kernel: Callable[..., None], *inputs: object) -> None:
    """Fill a matrix on the CPU by a kernel, which writes its numbers by `put_number`."""
    target = out.view(torch.int16).numpy() if out.dtype == torch.float16 else _array(out)
    kernel(*(_array(x) if isinstance(x, torch.Tensor) else x for x in inputs), target)


def _array(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor for kernels, with 16-bit types as integers."""
    return (values.view(torch.uint16) if values.dtype in (torch.float16, torch.bfloat16) else values).numpy()
