"""Matrices of few bits in memory: one value for each stored layout, with the tensors and numbers to unpack it.

A value's `shape` is that of the matrix, (outputs, inputs). A weight is (number - zero) * scale of its group, in
float32, then rounded to the compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

Tuple = TypeVar("Tuple")


def _keeping(cls: type[Tuple]) -> type[Tuple]:
    """A named tuple whose values have `vars`, in which kernels keep what they take of a value."""
    return type(cls.__name__, (cls,), {"__doc__": cls.__doc__, "__module__": cls.__module__})


@_keeping
class Down(NamedTuple):
    """GPTQ's layout: integers packed along inputs, the matrix transposed."""

    words: torch.Tensor  # (inputs * bits / 32, outputs) int32
    zeros: torch.Tensor  # (groups, outputs * bits / 32) int32
    scales: torch.Tensor  # (groups, outputs)
    groups: torch.Tensor | None  # (inputs,) int32: group of each input; None if they are in order
    bits: int
    zero_offset: int  # added to zeros

    @property
    def shape(self) -> tuple[int, int]:
        return (self.words.shape[1], self.words.shape[0] * 32 // self.bits)


@_keeping
class Across(NamedTuple):
    """AWQ's layout: 4-bit integers packed along outputs in the order 0, 2, 4, 6, 1, 3, 5, 7, the matrix transposed."""

    words: torch.Tensor  # (inputs, outputs / 8) int32
    zeros: torch.Tensor  # (groups, outputs / 8) int32
    scales: torch.Tensor  # (groups, outputs)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.words.shape[1] * 8, self.words.shape[0])


@_keeping
class Along(NamedTuple):
    """Numbers by rows, as of `bough.model.quant.scaled`."""

    # (outputs, inputs) int8 or float8_e4m3fn, (outputs, inputs * bits / 32) int32, or (outputs, inputs / 2) uint8: E2M1
    numbers: torch.Tensor
    scales: torch.Tensor  # (blocks, groups), for blocks of `block` outputs and inputs
    zeros: torch.Tensor | None  # (outputs * bits / 32, groups) int32; None: 0, or the middle of unsigned numbers
    groups: torch.Tensor | None  # (inputs,) int32: group of each input; None if they are in order
    bits: int
    block: tuple[int, int]  # outputs and inputs that share a scale
    whole: torch.Tensor | None = None  # one float32, a factor of all scales, or their divisor
    is_divided: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        outputs, elements = self.numbers.shape
        return (outputs, elements * self.numbers.element_size() * 8 // self.bits)

    def joined_scales(self) -> torch.Tensor:
        """Scales as float32, times the factor of all."""
        scales = self.scales.float()
        if self.whole is None:
            return scales
        return scales.div_(self.whole) if self.is_divided else scales.mul_(self.whole)


@_keeping
class InBlocks(NamedTuple):
    """GGUF's blocks by rows, as `bough.model.quant.ggml_blocks.Blocks`."""

    data: torch.Tensor  # (outputs, bytes) uint8
    size: tuple[int, int]  # numbers and bytes of a block
    type_: Any  # a type of `bough.model.quant.ggml_blocks`
    half: int

    @property
    def shape(self) -> tuple[int, int]:
        outputs, num_bytes = self.data.shape
        return (outputs, num_bytes // self.size[1] * self.size[0])


Packed = Down | Across | Along | InBlocks
Matrix = torch.Tensor | Packed
AnyPacked = TypeVar("AnyPacked", bound=Packed)


def is_transposed(matrix: Packed) -> bool:
    """Whether the matrix is written out as the transpose of a contiguous one."""
    return isinstance(matrix, Down | Across)


def parts_of(matrix: AnyPacked, num_weights: int) -> Iterator[tuple[slice, AnyPacked]]:
    """Outputs of a matrix, and the matrix of these in the same memory: as many as have about `num_weights`."""
    whole, inputs = matrix.shape
    step = _least_outputs(matrix)
    step *= max(1, num_weights // (inputs * step))
    for begin in range(0, whole, step):
        own = slice(begin, min(whole, begin + step))
        yield own, _part(matrix, own)


def _least_outputs(matrix: Packed) -> int:
    """Outputs that share words, scales or places, of which parts have a multiple."""
    if isinstance(matrix, InBlocks):
        return 2 * matrix.half
    words = 8 if isinstance(matrix, Across) else 32 // matrix.bits
    height = matrix.block[0] if isinstance(matrix, Along) and len(matrix.scales) > 1 else 1
    return math.lcm(words, height)


def _part(matrix: AnyPacked, own: slice) -> AnyPacked:
    if isinstance(matrix, InBlocks):
        return matrix._replace(data=matrix.data[own])
    words = slice(*(-(-at * (4 if isinstance(matrix, Across) else matrix.bits) // 32) for at in (own.start, own.stop)))
    if isinstance(matrix, Across):
        return matrix._replace(words=matrix.words[:, words], zeros=matrix.zeros[:, words], scales=matrix.scales[:, own])
    if isinstance(matrix, Down):
        return matrix._replace(words=matrix.words[:, own], zeros=matrix.zeros[:, words], scales=matrix.scales[:, own])
    height = matrix.block[0]
    blocks = slice(own.start // height, -(-own.stop // height))
    zeros = None if matrix.zeros is None else matrix.zeros[words]
    return matrix._replace(numbers=matrix.numbers[own], scales=matrix.scales[blocks], zeros=zeros)


class Stack(NamedTuple):
    """Matrices of a layer's experts on one device, of the same layout, shape and types, and their biases."""

    first: Matrix  # one of them, of whose layout all are
    bias: torch.Tensor | None  # (outputs,): its bias; None if they have none
    addresses: torch.Tensor  # (experts, 6) int64: of each one's tensors, in the order of `tensors_of`, and of its bias
    alignment: int  # of its numbers' addresses in bytes, at most 16
    matrices: tuple[Matrix | None, ...]  # None: not on the device, and not asked for
    biases: tuple[torch.Tensor | None, ...]

    @classmethod
    def of(cls, matrices: Sequence[Matrix | None], biases: Sequence[torch.Tensor | None] = ()) -> Stack:
        """Send addresses to the device; at least one matrix is there."""
        biases = tuple(biases) or (None,) * len(matrices)
        at, first = next((i, matrix) for i, matrix in enumerate(matrices) if matrix is not None)
        parts = [(*tensors_of(matrix), bias) for matrix, bias in zip(matrices, biases, strict=True)]
        table = [[0 if part is None else part.data_ptr() for part in own] for own in parts]
        alignment = math.gcd(16, *(address for own in table for address in own[:4]))
        device = (first if isinstance(first, torch.Tensor) else first[0]).device
        addresses = torch.tensor(table, dtype=torch.int64).to(device)
        return cls(first, biases[at], addresses, alignment, tuple(matrices), biases)


class ExpertTiles(NamedTuple):
    """The rows that experts compute: entries, one for each choice of a row, in the order of experts.

    Made on the device, without the host's knowledge of what was chosen.
    """

    table: torch.Tensor  # (tiles, 3) int32: expert, first entry and end; tiles that are not needed are empty
    places: torch.Tensor  # (entries,) int32: each one's row
    entries: torch.Tensor  # (entries,) int32: of each choice, row by row


def num_experts_of(table: torch.Tensor) -> int:
    """How many experts have entries in a table of `ExpertTiles` on the host."""
    return len({*table[table[:, 1] < table[:, 2], 0].tolist()})


def tensors_of(matrix: Matrix | None) -> tuple[torch.Tensor | None, ...]:
    """A matrix's numbers, scales, zeros, groups of inputs, and factor of all scales; None for what it does not have."""
    if matrix is None:
        return (None,) * 5
    if isinstance(matrix, torch.Tensor):
        return (matrix, *(None,) * 4)
    if isinstance(matrix, InBlocks):
        return (matrix.data, *(None,) * 4)
    if isinstance(matrix, Across):
        return (matrix.words, matrix.scales, matrix.zeros, None, None)
    if isinstance(matrix, Down):
        return (matrix.words, matrix.scales, matrix.zeros, matrix.groups, None)
    return (matrix.numbers, matrix.scales, matrix.zeros, matrix.groups, matrix.whole)
