"""Dequantization of GGUF's blocks on a GPU: one Triton kernel, for each type compiled with where its bits are.

Results have the bits of `bough.model.quant.ggml_blocks`: only the sum with an offset is rounded before the output. A
tile reads each byte once for every number in it, which a GPU's cache serves.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl

from bough.model.gpu.number_formats_triton import rounded
from bough.model.gpu.unpack_triton import bits_of, options

TILE_NUMBERS = 4096  # of a tile


@triton.jit
def _part(block: tl.tensor, j: tl.tensor, is_in: tl.tensor, NUMBERS: tl.constexpr, AT: tl.constexpr) -> tl.tensor:
    """Some bits of numbers j; what a `Part` of `ggml_blocks` says of them begins at AT of NUMBERS."""
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
