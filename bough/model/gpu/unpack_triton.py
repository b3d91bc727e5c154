"""Dequantization of weights of few bits on a GPU: one Triton kernel for each layout.

Results have the bits of the torch code in `bough.model.quant`: an integer of at most 8 bits times a scale of 11 bits is
exact in float32, so the only rounding is that to the output type; with a wider scale the product is first rounded to
float32. A tile reads its packed bytes and its scales once. If inputs are not in the order of their groups, every input
reads the scales of its group, which stay in the GPU's cache.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl

NUM_WARPS = 4
TILE_ROWS, TILE_COLUMNS = 32, 128  # inputs (at most) and outputs of a tile in GPTQ's and AWQ's formats; else reversed
LEAST_COLUMNS = 32  # inputs of a tile within one group, below which each input's own scale is read
KINDS = {torch.int32: "UNSIGNED", torch.int8: "SIGNED", torch.float8_e4m3fn: "E4M3", torch.uint8: "E2M1"}
TILE_NUMBERS = 4096  # of a tile


@triton.jit
def rounded(value: tl.tensor, IS_BF16: tl.constexpr, out: tl.tensor) -> tl.tensor:
    """Convert to the type of `out`: bfloat16 as bits rounded to nearest even; Triton's interpreter does not round."""
    if IS_BF16:
        bits = value.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    return value.to(out.dtype.element_ty)


@triton.jit
def from_e4m3(bits: tl.tensor) -> tl.tensor:
    """The float32 of E4M3 numbers, through float16, whose exponent has one bit more; any GPU can do this."""
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def from_e2m1(bits: tl.tensor) -> tl.tensor:
    """The float32 of E2M1 numbers, through float16, whose exponent has three bits more."""
    half = (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


@triton.jit
def from_e8m0(bits: tl.tensor) -> tl.tensor:
    """The float32 of powers of two, whose bits are a float32's exponent; the smallest is subnormal."""
    bits = bits.to(tl.int32)
    return tl.where(bits == 0, 1 << 22, tl.where(bits == 255, 0x7FC00000, bits << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _spread(words: tl.tensor, PER_WORD: tl.constexpr) -> tl.tensor:
    """Repeat every column PER_WORD times, side by side."""
    words = tl.interleave(words, words)
    words = tl.interleave(words, words)
    if PER_WORD == 8:
        words = tl.interleave(words, words)
    return words


@triton.jit
def unpack_down(
    words: tl.tensor,  # (num_inputs / PER_WORD, num_outputs) int32
    zeros: tl.tensor,  # (num_groups, num_outputs / PER_WORD) int32
    scales: tl.tensor,  # (num_groups, num_outputs) float16
    group_of: tl.tensor,  # (num_inputs,) int32; used with HAS_ORDER
    out: tl.tensor,  # (num_inputs, num_outputs)
    num_inputs: tl.tensor,
    num_outputs: tl.tensor,
    group_size: tl.tensor,  # used without HAS_ORDER
    zero_offset: tl.tensor,
    num_groups: tl.tensor,
    BITS: tl.constexpr,
    IS_ORDERED: tl.constexpr,  # all inputs of a tile are in the same group
    HAS_ORDER: tl.constexpr,  # groups are not consecutive inputs
    ROWS: tl.constexpr,  # rows of words
    COLUMNS: tl.constexpr,
    IS_BF16: tl.constexpr,
) -> None:
    PER_WORD: tl.constexpr = 32 // BITS
    MASK: tl.constexpr = (1 << BITS) - 1
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    word_columns = tl.program_id(1) * (COLUMNS // PER_WORD) + tl.arange(0, COLUMNS // PER_WORD)
    is_column, is_row = columns < num_outputs, rows < num_inputs // PER_WORD
    is_in, is_zero = is_row[:, None] & is_column[None, :], word_columns < num_outputs // PER_WORD
    tile = tl.load(words + rows[:, None].to(tl.int64) * num_outputs + columns[None, :], mask=is_in, other=0)
    shifts = BITS * (columns % PER_WORD)
    if IS_ORDERED:
        group = tl.program_id(0).to(tl.int64) * (ROWS * PER_WORD) // group_size
        scale = tl.load(scales + group * num_outputs + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        zero = tl.load(zeros + group * (num_outputs // PER_WORD) + word_columns, mask=is_zero, other=0)
        zero = (((_spread(zero, PER_WORD) >> shifts) & MASK) + zero_offset).to(tl.float32)[None, :]
    for i in tl.static_range(PER_WORD):
        inputs = (rows * PER_WORD + i).to(tl.int64)
        if not IS_ORDERED:
            groups = tl.load(group_of + inputs, mask=is_row, other=0) if HAS_ORDER else inputs // group_size
            groups = tl.minimum(tl.maximum(groups, 0), num_groups - 1)  # an invalid group must not read out of bounds
            groups = groups.to(tl.int64)
            scale = tl.load(scales + groups[:, None] * num_outputs + columns[None, :], mask=is_in, other=0.0)
            scale = scale.to(tl.float32)
            places = groups[:, None] * (num_outputs // PER_WORD) + word_columns[None, :]
            zero = tl.load(zeros + places, mask=is_row[:, None] & is_zero[None, :], other=0)
            zero = (((_spread(zero, PER_WORD) >> shifts[None, :]) & MASK) + zero_offset).to(tl.float32)
        value = (((tile >> (BITS * i)) & MASK).to(tl.float32) - zero) * scale
        cells = inputs[:, None] * num_outputs + columns[None, :]
        tl.store(out + cells, rounded(value, IS_BF16, out), mask=is_in)


@triton.jit
def unpack_across(
    words: tl.tensor,  # (num_inputs, num_outputs / 8) int32
    zeros: tl.tensor,  # (num_groups, num_outputs / 8) int32
    scales: tl.tensor,  # (num_groups, num_outputs) float16
    out: tl.tensor,  # (num_inputs, num_outputs)
    num_inputs: tl.tensor,
    num_outputs: tl.tensor,
    group_size: tl.tensor,  # a multiple of ROWS
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_BF16: tl.constexpr,
) -> None:
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    word_columns = tl.program_id(1) * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
    is_column, is_word = columns < num_outputs, word_columns < num_outputs // 8
    is_row = rows < num_inputs
    group = tl.program_id(0).to(tl.int64) * ROWS // group_size
    shifts = 4 * ((columns % 8) // 2 + 4 * (columns % 2))  # AWQ's order in a word: 0, 2, 4, 6, 1, 3, 5, 7
    scale = tl.load(scales + group * num_outputs + columns, mask=is_column, other=0.0).to(tl.float32)
    zero = tl.load(zeros + group * (num_outputs // 8) + word_columns, mask=is_word, other=0)
    zero = ((_spread(zero, 8) >> shifts) & 15).to(tl.float32)
    places = rows[:, None] * (num_outputs // 8) + word_columns[None, :]
    tile = tl.load(words + places, mask=is_row[:, None] & is_word[None, :], other=0)
    integers = ((_spread(tile, 8) >> shifts[None, :]) & 15).to(tl.float32)
    value = (integers - zero[None, :]) * scale[None, :]
    cells = rows[:, None] * num_outputs + columns[None, :]
    tl.store(out + cells, rounded(value, IS_BF16, out), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def unpack_along(
    numbers: tl.tensor,  # (num_outputs, num_inputs * BITS / 8) uint8
    zeros: tl.tensor,  # (num_outputs / (32 / BITS), rounded up, num_groups) int32; unused without HAS_ZEROS
    scales: tl.tensor,  # (num_outputs / height, rounded up, num_groups); uint8 are powers of two
    group_of: tl.tensor,  # (num_inputs,) int32; used with HAS_ORDER
    out: tl.tensor,  # (num_outputs, num_inputs)
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    num_groups: tl.tensor,
    height: tl.tensor,  # outputs that share a scale
    group_size: tl.tensor,  # used without HAS_ORDER
    BITS: tl.constexpr,
    KIND: tl.constexpr,  # UNSIGNED, SIGNED, E4M3 or E2M1
    HAS_ZEROS: tl.constexpr,
    IS_ORDERED: tl.constexpr,  # all inputs of a tile are in the same group
    HAS_ORDER: tl.constexpr,  # groups are not consecutive inputs
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_BF16: tl.constexpr,
) -> None:
    PER_BYTE: tl.constexpr = 8 // BITS
    PER_WORD: tl.constexpr = 32 // BITS
    MASK: tl.constexpr = (1 << BITS) - 1
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    bytes_ = (tl.program_id(1) * (COLUMNS // PER_BYTE) + tl.arange(0, COLUMNS // PER_BYTE))[None, :]
    is_row, is_column, num_bytes = rows < num_outputs, columns < num_inputs, num_inputs // PER_BYTE
    value = tl.load(numbers + rows * num_bytes + bytes_, mask=is_row & (bytes_ < num_bytes), other=0).to(tl.int32)
    if BITS == 4:
        value = tl.interleave(value & MASK, value >> 4)
    if IS_ORDERED:
        group, is_in = tl.program_id(1) * COLUMNS // group_size, is_row
    else:
        is_in = is_row & is_column
        group = tl.load(group_of + columns, mask=is_column, other=0) if HAS_ORDER else columns // group_size
        group = tl.minimum(tl.maximum(group, 0), num_groups - 1)  # an invalid group must not read out of bounds
    scale = tl.load(scales + rows // height * num_groups + group, mask=is_in, other=0)
    scale = from_e8m0(scale) if scales.dtype.element_ty == tl.uint8 else scale.to(tl.float32)
    if KIND == "E4M3":
        value = from_e4m3(value)
    elif KIND == "E2M1":
        value = from_e2m1(value)
    elif KIND == "SIGNED":
        value = value.to(tl.int8).to(tl.float32)
    elif HAS_ZEROS:
        word = tl.load(zeros + rows // PER_WORD * num_groups + group, mask=is_in, other=0)
        value = (value - ((word >> (BITS * (rows % PER_WORD)).to(tl.int32)) & MASK)).to(tl.float32)
    else:
        value = (value - (1 << (BITS - 1))).to(tl.float32)
    cells = rows * num_inputs + columns
    tl.store(out + cells, rounded(value * scale, IS_BF16, out), mask=is_row & is_column)


def write_down(
    words: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor | None,
    bits: int,
    zero_offset: int,
    out: torch.Tensor,
) -> None:
    """`Backend.write_down`."""
    num_inputs, num_outputs = out.shape
    group_size, per_word = num_inputs // len(scales), 32 // bits
    has_order = groups is not None
    rows = (TILE_ROWS if has_order else _tile_rows(group_size)) // per_word
    is_ordered = not has_order and rows > 0  # a tile must hold whole words
    rows = max(rows, 1)
    grid = (triton.cdiv(num_inputs // per_word, rows), triton.cdiv(num_outputs, TILE_COLUMNS))
    numbers = num_inputs, num_outputs, group_size, zero_offset, len(scales)
    constants = {"BITS": bits, "IS_ORDERED": is_ordered, "HAS_ORDER": has_order, "ROWS": rows, "COLUMNS": TILE_COLUMNS}
    order = words if groups is None else groups
    unpack_down[grid](words, zeros, scales, order, bits_of(out), *numbers, **constants, **options(out))


def write_across(words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """`Backend.write_across`."""
    num_inputs, num_outputs = out.shape
    group_size = num_inputs // len(scales)
    rows = _tile_rows(group_size)
    grid = (triton.cdiv(num_inputs, rows), triton.cdiv(num_outputs, TILE_COLUMNS))
    constants = {"ROWS": rows, "COLUMNS": TILE_COLUMNS}
    numbers = num_inputs, num_outputs, group_size
    unpack_across[grid](words, zeros, scales, bits_of(out), *numbers, **constants, **options(out))


def write_along(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    groups: torch.Tensor | None,
    bits: int,
    block: tuple[int, int],
    out: torch.Tensor,
) -> None:
    """`Backend.write_along`."""
    (num_outputs, num_inputs), (height, group_size) = out.shape, block
    kind = KINDS[numbers.dtype]
    scales = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
    columns = TILE_COLUMNS if scales.shape[1] == 1 else min(TILE_COLUMNS, group_size & -group_size)
    is_ordered = groups is None and columns >= LEAST_COLUMNS
    packed, columns = numbers.view(torch.uint8), columns if is_ordered else TILE_COLUMNS
    rows = TILE_ROWS if groups is None else TILE_ROWS // 2  # a scale for each cell takes registers
    grid = (triton.cdiv(num_outputs, rows), triton.cdiv(num_inputs, columns))
    constants = {"BITS": bits, "KIND": kind, "HAS_ZEROS": zeros is not None, "IS_ORDERED": is_ordered}
    constants |= {"HAS_ORDER": groups is not None, "ROWS": rows, "COLUMNS": columns}
    numbers_ = num_outputs, num_inputs, scales.shape[1], height, group_size
    others = packed if zeros is None else zeros, scales, packed if groups is None else groups
    unpack_along[grid](packed, *others, bits_of(out), *numbers_, **constants, **options(out))


def _tile_rows(group_size: int) -> int:
    """Number of inputs of a tile: a power of two that divides a group."""
    return min(TILE_ROWS, group_size & -group_size)


def bits_of(out: torch.Tensor) -> torch.Tensor:
    return out.view(torch.int16) if out.dtype == torch.bfloat16 else out


def options(out: torch.Tensor) -> dict[str, object]:
    """Compiler options: products and sums are not fused, as in the reference; the default differs between versions."""
    return {"IS_BF16": out.dtype == torch.bfloat16, "num_warps": NUM_WARPS, "enable_fp_fusion": False}


@triton.jit
def _part(block: tl.tensor, j: tl.tensor, is_in: tl.tensor, NUMBERS: tl.constexpr, AT: tl.constexpr) -> tl.tensor:
    """Some bits of numbers j; their `BitField` of `ggml_blocks` begins at AT of NUMBERS."""
    places = NUMBERS[AT + 1] + j // NUMBERS[AT + 2] * NUMBERS[AT + 3] + j % NUMBERS[AT + 4]
    shifts = NUMBERS[AT + 7] + j % NUMBERS[AT + 2] // NUMBERS[AT + 5] * NUMBERS[AT + 6]
    return (tl.load(block + places, mask=is_in, other=0).to(tl.int32) >> shifts) & ((1 << NUMBERS[AT]) - 1)


@triton.jit
def _number(block: tl.tensor, j: tl.tensor, is_in: tl.tensor, NUMBERS: tl.constexpr) -> tl.tensor:
    """Numbers j of blocks; NUMBERS is a `Numbers` of `ggml_blocks`, flat, with its codes as 128 more in four words."""
    number = _part(block, j, is_in, NUMBERS, 0)
    if NUMBERS[8]:
        number = number | (_part(block, j, is_in, NUMBERS, 8) << NUMBERS[0])
    if NUMBERS[18]:
        low, high = tl.where(number < 4, NUMBERS[18], NUMBERS[19]), tl.where(number < 12, NUMBERS[20], NUMBERS[21])
        return (((tl.where(number < 8, low, high) >> (number % 4 * 8)) & 255) - 128).to(tl.float32)
    return ((number ^ NUMBERS[16]) - NUMBERS[17]).to(tl.float32)


@triton.jit
def _half(block: tl.tensor, is_in: tl.tensor, AT: tl.constexpr) -> tl.tensor:
    """The float32 of a float16 at byte AT of blocks."""
    low, high = tl.load(block + AT, mask=is_in, other=0), tl.load(block + AT + 1, mask=is_in, other=0)
    bits = low.to(tl.int32) | (high.to(tl.int32) << 8)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def unpack_blocks(
    data: tl.tensor,  # (rows, row_blocks * NUM_BYTES) uint8
    out: tl.tensor,  # (rows, row_blocks * GROUPS * SIZE)
    num_blocks: tl.tensor,
    row_blocks: tl.tensor,
    half: tl.tensor,  # as of `ggml_blocks.Blocks`
    NUM_BYTES: tl.constexpr,
    NUMBERS: tl.constexpr,
    SCALE: tl.constexpr,  # byte of the scale
    OFFSET: tl.constexpr,  # byte of the offset, or -1
    SCALES: tl.constexpr,
    MINS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,  # numbers of a group
    TILE: tl.constexpr,
    IS_BF16: tl.constexpr,
) -> None:
    blocks = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_in, row = (blocks < num_blocks)[:, None, None], blocks // row_blocks
    within = row % (2 * half)
    file_row = row - within + 2 * (within % half) + within // half
    block = data + ((file_row * row_blocks + blocks % row_blocks) * NUM_BYTES)[:, None, None]
    group = tl.arange(0, GROUPS)[None, :, None]
    j = group * SIZE + tl.arange(0, SIZE)[None, None, :]
    scale = _half(block, is_in, SCALE)
    if SCALES[0]:
        scale = scale * _number(block, group, is_in, SCALES)
    value = scale * _number(block, j, is_in, NUMBERS)
    if OFFSET >= 0:
        offset = _half(block, is_in, OFFSET)
        if MINS[0]:
            offset = -offset * _number(block, group, is_in, MINS)
        value = value + offset
    cells = out + blocks[:, None, None] * (GROUPS * SIZE) + j
    tl.store(cells, rounded(value, IS_BF16, out), mask=is_in)


def write_blocks(data: torch.Tensor, size: tuple[int, int], type_: Any, half: int, out: torch.Tensor) -> None:
    """`Backend.write_blocks`."""
    num_blocks = out.numel() // size[0]
    constants = block_constants(size, type_)
    grid = (triton.cdiv(num_blocks, constants["TILE"]),)
    unpack_blocks[grid](data, bits_of(out), num_blocks, out.shape[1] // size[0], half, **constants, **options(out))


def block_constants(size: tuple[int, int], type_: Any) -> dict[str, Any]:
    """The constants of `unpack_blocks` for a type."""
    kinds = {"NUMBERS": type_.numbers, "SCALES": type_.scales, "MINS": type_.mins}
    constants: dict[str, Any] = {
        name: (*kind.low, *kind.high, kind.flip, kind.center, *_words(kind.codes)) for name, kind in kinds.items()
    }
    constants |= {"SCALE": type_.scale, "OFFSET": type_.offset, "GROUPS": type_.num_groups}
    return constants | {"NUM_BYTES": size[1], "SIZE": size[0] // type_.num_groups, "TILE": TILE_NUMBERS // size[0]}


def _words(codes: tuple[int, ...]) -> tuple[int, ...]:
    """16 signed bytes, each 128 more, as 32-bit integers; zeros if there are none."""
    bytes_ = bytes(code + 128 for code in codes) or bytes(16)
    return struct.unpack("<4i", bytes_)
