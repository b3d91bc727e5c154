"""Weights in the blocks of GGUF files: a float16 scale for 32 or 256 numbers of a row, and smaller scales within.

A weight is scale * number, or scale * number plus an offset, in float32. Before the sum this is exact, so any order
of the products has the bits of the library gguf. `BitField` describes the places of a block's numbers by plain
arithmetic; tables for CPUs and constants of a kernel for GPUs are made from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.gguf_file import BLOCKS
from bough.model.checkpoint.tensor_source import typed
from bough.model.packed import InBlocks
from bough.model.quant.format import Dequantized, place_of


class BitField(NamedTuple):
    """Some bits of every number of a block.

    Number j has them in byte first + j // span * stride + j % width, above the lowest start + j % span // every * step.
    """

    bits: int  # 0: there are none
    first: int = 0
    span: int = 1
    stride: int = 0
    width: int = 1
    every: int = 1
    step: int = 0
    start: int = 0


class Numbers(NamedTuple):
    """All numbers of one kind in a block: (low bits, high bits above) ^ flip, minus center; or looked up in codes."""

    low: BitField
    high: BitField = BitField(0)
    flip: int = 0  # 128 for signed bytes, of which 128 is then the center
    center: int = 0
    codes: tuple[int, ...] = ()  # signed bytes; the bits are an index into them


class BlockType(NamedTuple):
    """The layout of a block: the places of its numbers, scales and offset."""

    numbers: Numbers
    scale: int  # byte of a float16
    offset: int = -1  # byte of a float16; -1: none
    scales: Numbers = Numbers(BitField(0))  # factor of the scale, for each group of the block's numbers
    mins: Numbers = Numbers(BitField(0))  # factor of the offset, which is then subtracted
    num_groups: int = 1


def _nibbles(first: int, half: int) -> BitField:
    """4 bits of numbers: the first `half` are the low bits of as many bytes, the next `half` the high bits."""
    return BitField(4, first, 2 * half, half, half, half, 4)


def _pairs(first: int) -> BitField:
    """2 bits of 128 numbers in 32 bytes."""
    return BitField(2, first, 128, 32, 32, 32, 2)


def _above(first: int) -> BitField:
    """A bit of 256 numbers in 32 bytes."""
    return BitField(1, first, 256, 0, 32, 32, 1)


_BITS_OF_32 = {first: BitField(1, first, 8, 1, 1, 1, 1) for first in (2, 4)}
_SIX_BITS = (  # of Q4_K and Q5_K: scales, minima
    Numbers(BitField(4, 4, 4, 8, 4), BitField(2, 4, 8, 0, 4, 4, 2, 4)),
    Numbers(BitField(4, 8, 8, 0, 8, 4, 4), BitField(2, 8, 8, 0, 4, 4, 2, 4)),
)
_CODES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4_NL, as ggml has them
TYPES = {
    "Q4_0": BlockType(Numbers(_nibbles(2, 16), center=8), 0),
    "Q4_1": BlockType(Numbers(_nibbles(4, 16)), 0, 2),
    "Q5_0": BlockType(Numbers(_nibbles(6, 16), _BITS_OF_32[2], center=16), 0),
    "Q5_1": BlockType(Numbers(_nibbles(8, 16), _BITS_OF_32[4]), 0, 2),
    "Q8_0": BlockType(Numbers(BitField(8, 2, 32, 0, 32), flip=128, center=128), 0),
    "Q2_K": BlockType(
        Numbers(_pairs(16)), 80, 82, Numbers(BitField(4, 0, 16, 0, 16)), Numbers(BitField(4, 0, 16, 0, 16, start=4)), 16
    ),
    "Q3_K": BlockType(
        Numbers(_pairs(32), _above(0), center=4),
        108,
        scales=Numbers(BitField(4, 96, 16, 0, 8, 8, 4), BitField(2, 104, 16, 0, 4, 4, 2), center=32),
        num_groups=16,
    ),
    "Q4_K": BlockType(Numbers(_nibbles(16, 32)), 0, 2, *_SIX_BITS, 8),
    "Q5_K": BlockType(Numbers(_nibbles(48, 32), _above(16)), 0, 2, *_SIX_BITS, 8),
    "Q6_K": BlockType(
        Numbers(_nibbles(0, 64), _pairs(128), center=32),
        208,
        scales=Numbers(BitField(8, 192, 16, 0, 16), flip=128, center=128),
        num_groups=16,
    ),
    "IQ4_NL": BlockType(Numbers(_nibbles(2, 16), codes=_CODES), 0),
    "IQ4_XS": BlockType(
        Numbers(_nibbles(8, 16), codes=_CODES),
        0,
        scales=Numbers(BitField(4, 4, 2, 1, 1, 1, 4), BitField(2, 2, 4, 1, 1, 1, 2), center=32),
        num_groups=8,
    ),
}


def sample(kind: str, outputs: int, inputs: int) -> Blocks:
    """A matrix without a file."""
    values, block_bytes = BLOCKS[kind]
    return Blocks(place_of("U8", outputs, inputs // values * block_bytes), kind)


@dataclass(frozen=True, slots=True)
class Blocks(Dequantized):
    """A weight in blocks by rows."""

    place: TensorPlace  # (rows, bytes of a row) U8
    kind: str  # of TYPES
    # In a file, rows that are rotated together are adjacent: row i of a head, and row i + half.
    half: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        rows, num_bytes = self.place.shape
        values, block_bytes = BLOCKS[self.kind]
        return (rows, num_bytes // block_bytes * values)

    def random(self, rng: np.random.Generator) -> list[torch.Tensor]:
        """Random bytes; scales and offsets are of either sign, and not too large for any dtype."""
        blocks = rng.integers(0, 256, (self.place.num_bytes // BLOCKS[self.kind][1], BLOCKS[self.kind][1]), np.uint8)
        of = TYPES[self.kind]
        for high in (at + 1 for at in (of.scale, of.offset) if at >= 0):
            blocks[:, high] = blocks[:, high] & 0x87 | 0x18  # 2**-9 to 2**-7
        return [torch.from_numpy(blocks.reshape(-1))]

    @property
    def is_by_rows(self) -> bool:
        """Whether any rows of the value can be made from the same rows of the tensor."""
        return self.half == 1

    def packed(self, raw: Sequence[torch.Tensor]) -> InBlocks:
        return InBlocks(typed(raw[0], self.place), BLOCKS[self.kind], TYPES[self.kind], self.half)

    def write(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Dequantize the tensor's bytes."""
        self._write([data], out)
