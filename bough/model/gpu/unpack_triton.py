"""Tiles of matrices in memory, packed ones included, on a GPU; and a kernel that writes a matrix out.

Every layout has a device function, which loads a tile (inputs, outputs) and unpacks it in registers. Weights have the
bits of the reference backend: an integer of at most 8 bits times a scale of 11 bits is exact in float32, so the only
rounding is that to the 16-bit type; with a wider scale the product is first rounded to float32. A tile reads its packed
bytes and its scales once. If inputs are not in the order of their groups, every input reads the scales of its group,
which stay in the GPU's cache.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from bough.model.packed import Across, Along, InBlocks, Matrix, Packed, tensors_of

NUM_WARPS = 4
WIDTH = 64  # inputs and outputs of a tile, always: a row's bits in a product depend on the inputs' order
TILE: Any = WIDTH if knobs.runtime.interpret else tl.constexpr(WIDTH)  # kernels take no other global numbers
KINDS = {torch.int8: "SIGNED", torch.float8_e4m3fn: "E4M3", torch.uint8: "E2M1"}


Tensors = tuple[torch.Tensor | None, ...]  # as of `packed.tensors_of`


class Sizes(NamedTuple):
    """What a layout's device function must know of a matrix, apart from constants."""

    outputs: int
    inputs: int
    strides: tuple[int, int] = (0, 0)  # of a plain matrix, by outputs and inputs
    words: int = 0  # elements of `numbers` in a row
    num_groups: int = 1
    group_size: int = 1
    height: int = 1  # outputs that share a scale
    zero_offset: int = 0
    half: int = 1  # as of `ggml_blocks.Blocks`


class Layout(NamedTuple):
    """Constants of a layout."""

    name: str  # PLAIN, DOWN, ACROSS, ALONG or BLOCKS
    kind: str = "UNSIGNED"  # or SIGNED, E4M3, E2M1
    bits: int = 4
    per_word: int = 1  # numbers of an element of `numbers`
    groups: int = 1  # of a tile
    scale_kind: str = ""  # E4M3 or E8M0; "": floating-point numbers
    is_divided: bool = False
    factors: str = "EARLY"  # when a product loads them: ONCE, EARLY (a tile before) or with the tile
    blocks: Any = None  # a `BlockLayout`


class BlockLayout(NamedTuple):
    """Constants of a type of `ggml_blocks`; its kinds of numbers flat, with their codes as 128 more in four words."""

    numbers: tuple[int, ...]
    scales: tuple[int, ...]
    mins: tuple[int, ...]
    scale: int  # byte of the scale
    offset: int  # byte of the offset, or -1
    size: int  # numbers of a block
    num_bytes: int
    group: int  # numbers of a group
    half: int  # numbers of 4 bits lie in bytes: so many low ones, then as many high ones; 0: in another way


@triton.jit
def rounded(value: tl.tensor, IS_BF16: tl.constexpr, out: tl.tensor) -> tl.tensor:
    """Convert to the type of `out`: bfloat16 as bits rounded to nearest even; Triton's interpreter does not round."""
    if IS_BF16:
        bits = tl.minimum(value.to(tl.int32, bitcast=True), 0x7FFF0000)  # the NaN of a GPU, 0x7FFFFFFF, would become -0
        value = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        value = value.to(out.dtype.element_ty)
    return value


@triton.jit
def nearest(value: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Numbers float32, rounded to the type of `like`."""
    if like.dtype.element_ty == tl.bfloat16:
        return (rounded(value, True, like).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(like.dtype.element_ty).to(tl.float32)


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
def _unpacked(words: tl.tensor, BITS: tl.constexpr, PER_WORD: tl.constexpr) -> tl.tensor:
    """The numbers (n * PER_WORD, columns) of words (n, columns), whose lowest bits are the first number."""
    if PER_WORD > 1:  # no return here: code after a static condition is compiled too
        shifts = BITS * tl.arange(0, PER_WORD)
        numbers = (words[:, None, :] >> shifts[None, :, None]) & ((1 << BITS) - 1)
        words = tl.reshape(numbers, (words.shape[0] * PER_WORD, words.shape[1]))
    return words


@triton.jit
def _unpacked_across(words: tl.tensor, BITS: tl.constexpr, IS_MIXED: tl.constexpr) -> tl.tensor:
    """The numbers (rows, n * 32 / BITS) of words (rows, n); IS_MIXED is AWQ's order in a word."""
    PER_WORD: tl.constexpr = 32 // BITS
    place = tl.arange(0, PER_WORD)
    shifts = BITS * (place // 2 + 4 * (place % 2) if IS_MIXED else place)
    numbers = (words[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(numbers, (words.shape[0], words.shape[1] * PER_WORD))


@triton.jit
def _spread(of_groups: tl.tensor) -> tl.tensor:
    """Each group's number (groups, outputs) for all of a tile's inputs; or for all of them those (outputs,) of one."""
    if len(of_groups.shape) == 1:
        of_groups = of_groups[None, :]
    elif of_groups.shape[0] > 1 and of_groups.shape[0] < TILE:
        GROUPS: tl.constexpr = of_groups.shape[0]
        wide = tl.broadcast_to(of_groups[:, None, :], (GROUPS, TILE // GROUPS, of_groups.shape[1]))
        of_groups = tl.reshape(wide, (TILE, of_groups.shape[1]))
    return of_groups


@triton.jit
def _scales(
    scales: tl.tensor, whole: tl.tensor, group: tl.tensor, n: tl.tensor, sizes: tl.tuple, LAYOUT: tl.constexpr
) -> tl.tensor:
    """Scales (groups, outputs) float32; (outputs,) of one group."""
    n = n if LAYOUT.groups == 1 else n[None, :]
    if LAYOUT.name == "ALONG":
        places = (n // sizes.height).to(tl.int64) * sizes.num_groups + group
    else:
        places = group.to(tl.int64) * sizes.outputs + n
    scale = tl.load(scales + places, mask=n < sizes.outputs, other=0)
    if LAYOUT.scale_kind == "E8M0":
        scale = from_e8m0(scale)
    elif LAYOUT.scale_kind == "E4M3":
        scale = from_e4m3(scale.to(tl.int32))
    else:
        scale = scale.to(tl.float32)
    if whole is not None:
        scale = tl.div_rn(scale, tl.load(whole)) if LAYOUT.is_divided else scale * tl.load(whole)
    return scale


@triton.jit
def _zeros(zeros: tl.tensor, group: tl.tensor, n_begin: tl.tensor, sizes: tl.tuple, LAYOUT: tl.constexpr) -> tl.tensor:
    """Zero points (groups, outputs) int32."""
    PER_WORD: tl.constexpr = 32 // LAYOUT.bits
    word, num_words = n_begin // PER_WORD + tl.arange(0, TILE // PER_WORD), tl.cdiv(sizes.outputs, PER_WORD)
    if LAYOUT.name == "ALONG":
        places = word[None, :].to(tl.int64) * sizes.num_groups + group
    else:
        places = group.to(tl.int64) * num_words + word[None, :]
    words = tl.load(zeros + places, mask=(word < num_words)[None, :], other=0)
    return _unpacked_across(words, LAYOUT.bits, LAYOUT.name == "ACROSS") + sizes.zero_offset


@triton.jit
def _numbers(
    numbers: tl.tensor, n_begin: tl.tensor, k_begin: tl.tensor, sizes: tl.tuple, LAYOUT: tl.constexpr
) -> tl.tensor:
    """Numbers (inputs, outputs) int32 of a tile."""
    PER_WORD: tl.constexpr = LAYOUT.per_word
    n = n_begin + tl.arange(0, TILE)
    if LAYOUT.name == "ACROSS":
        k, word = k_begin + tl.arange(0, TILE), n_begin // PER_WORD + tl.arange(0, TILE // PER_WORD)
        is_in = (k < sizes.inputs)[:, None] & (word < sizes.words)[None, :]
        places = k[:, None].to(tl.int64) * sizes.words + word[None, :]
        found = _unpacked_across(tl.load(numbers + places, mask=is_in, other=0), LAYOUT.bits, True)
    else:
        word = k_begin // PER_WORD + tl.arange(0, TILE // PER_WORD)
        if LAYOUT.name == "ALONG":
            places, is_word = n[None, :].to(tl.int64) * sizes.words + word[:, None], word < sizes.words
        else:
            places, is_word = word[:, None].to(tl.int64) * sizes.words + n[None, :], word < sizes.inputs // PER_WORD
        is_in = is_word[:, None] & (n < sizes.outputs)[None, :]
        found = _unpacked(tl.load(numbers + places, mask=is_in, other=0).to(tl.int32), LAYOUT.bits, PER_WORD)
    return found


@triton.jit
def _part(block: tl.tensor, j: tl.tensor, is_in: tl.tensor, NUMBERS: tl.constexpr, AT: tl.constexpr) -> tl.tensor:
    """Some bits of numbers j; their `BitField` of `ggml_blocks` begins at AT of NUMBERS."""
    places = NUMBERS[AT + 1] + j // NUMBERS[AT + 2] * NUMBERS[AT + 3] + j % NUMBERS[AT + 4]
    shifts = NUMBERS[AT + 7] + j % NUMBERS[AT + 2] // NUMBERS[AT + 5] * NUMBERS[AT + 6]
    return (tl.load(block + places, mask=is_in, other=0).to(tl.int32) >> shifts) & ((1 << NUMBERS[AT]) - 1)


@triton.jit
def _value_of(number: tl.tensor, NUMBERS: tl.constexpr) -> tl.tensor:
    """The float32 of a number's bits."""
    if NUMBERS[18]:
        low, high = tl.where(number < 4, NUMBERS[18], NUMBERS[19]), tl.where(number < 12, NUMBERS[20], NUMBERS[21])
        number = ((tl.where(number < 8, low, high) >> (number % 4 * 8)) & 255) - 128
    else:
        number = (number ^ NUMBERS[16]) - NUMBERS[17]
    return number.to(tl.float32)


@triton.jit
def _number(block: tl.tensor, j: tl.tensor, is_in: tl.tensor, NUMBERS: tl.constexpr) -> tl.tensor:
    """Numbers j of blocks."""
    number = _part(block, j, is_in, NUMBERS, 0)
    if NUMBERS[8]:
        number = number | (_part(block, j, is_in, NUMBERS, 8) << NUMBERS[0])
    return _value_of(number, NUMBERS)


@triton.jit
def _half(block: tl.tensor, is_in: tl.tensor, AT: tl.constexpr) -> tl.tensor:
    """The float32 of a float16 at byte AT of blocks."""
    low, high = tl.load(block + AT, mask=is_in, other=0), tl.load(block + AT + 1, mask=is_in, other=0)
    bits = low.to(tl.int32) | (high.to(tl.int32) << 8)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _nibbles(rows: tl.tensor, is_n: tl.tensor, k_begin: tl.tensor, inputs: tl.tensor, B: tl.constexpr) -> tl.tensor:
    """Numbers (inputs, outputs) of 4 bits, two in each byte, each byte loaded once."""
    CHUNKS: tl.constexpr = TILE // (2 * B.half)
    i = tl.arange(0, TILE // 2)
    first = k_begin + i // B.half * (2 * B.half)
    places = first // B.size * B.num_bytes + B.numbers[1] + first % B.size // (2 * B.half) * B.numbers[3] + i % B.half
    bytes_ = tl.load(rows[None, :] + places[:, None], mask=(first < inputs)[:, None] & is_n, other=0).to(tl.int32)
    bytes_ = tl.reshape(bytes_, (CHUNKS, 1, B.half, rows.shape[0]))
    numbers = (bytes_ >> (4 * tl.arange(0, 2))[None, :, None, None]) & 15
    NUMBERS: tl.constexpr = B.numbers
    return _value_of(tl.reshape(numbers, (TILE, rows.shape[0])), NUMBERS)


@triton.jit
def _block_rows(data: tl.tensor, n: tl.tensor, sizes: tl.tuple) -> tl.tensor:
    """Where the blocks of outputs begin."""
    within = n % (2 * sizes.half)
    file_row = n - within + 2 * (within % sizes.half) + within // sizes.half
    return data + file_row.to(tl.int64) * sizes.words


@triton.jit
def _block_factors(
    data: tl.tensor, n: tl.tensor, k_begin: tl.tensor, sizes: tl.tuple, B: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Scales and offsets (groups, outputs) float32."""
    first = (k_begin + tl.arange(0, TILE // B.group) * B.group)[:, None]
    block, group = _block_rows(data, n, sizes)[None, :] + first // B.size * B.num_bytes, first % B.size // B.group
    is_in = (first < sizes.inputs) & (n < sizes.outputs)[None, :]
    scale = _half(block, is_in, B.scale)
    offset = scale
    SCALES: tl.constexpr = B.scales  # Triton 3.6 takes a part of a constant only by a name
    MINS: tl.constexpr = B.mins
    if B.offset >= 0:
        offset = _half(block, is_in, B.offset)
        if B.mins[0]:
            offset = -offset * _number(block, group, is_in, MINS)
    if B.scales[0]:
        scale = scale * _number(block, group, is_in, SCALES)
    return scale, offset


@triton.jit
def factors(
    tensors: tl.tuple, sizes: tl.tuple, n_begin: tl.tensor, k_begin: tl.tensor, LAYOUT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """What `tile` multiplies the numbers of groups with, and adds to them; loaded apart, so that it can be early."""
    numbers, scales, _, order, whole = tensors
    n = n_begin + tl.arange(0, TILE)
    if LAYOUT.name == "PLAIN":
        scale, offset = k_begin, k_begin
    elif LAYOUT.name == "BLOCKS":
        BLOCKS: tl.constexpr = LAYOUT.blocks
        scale, offset = _block_factors(numbers, n, k_begin, sizes, BLOCKS)
    else:
        group = _group(order, k_begin, sizes, LAYOUT)
        scale = _scales(scales, whole, group, n, sizes, LAYOUT)
        offset = scale
    return scale, offset


@triton.jit
def _group(order: tl.tensor, k_begin: tl.tensor, sizes: tl.tuple, LAYOUT: tl.constexpr) -> tl.tensor:
    """The groups (groups, 1) of a tile, or its only one."""
    if LAYOUT.groups == 1:
        group = k_begin // sizes.group_size
    else:
        k = (k_begin + tl.arange(0, LAYOUT.groups) * (TILE // LAYOUT.groups))[:, None]
        group = k // sizes.group_size if order is None else tl.load(order + k, mask=k < sizes.inputs, other=0)
    return tl.minimum(tl.maximum(group, 0), sizes.num_groups - 1)  # an invalid one must not read out of bounds


@triton.jit
def tile(
    tensors: tl.tuple, sizes: tl.tuple, factors_: tl.tuple, n_begin: tl.tensor, k_begin: tl.tensor, LAYOUT: tl.constexpr
) -> tl.tensor:
    """Weights (inputs, outputs) from an input and an output on: float32, or a plain matrix's own type."""
    numbers, _, zeros, order, _ = tensors
    scale, offset = factors_
    n = n_begin + tl.arange(0, TILE)
    k = k_begin + tl.arange(0, TILE)
    is_in = (k < sizes.inputs)[:, None] & (n < sizes.outputs)[None, :]
    if LAYOUT.name == "PLAIN":
        places = n[None, :].to(tl.int64) * sizes.strides[0] + k[:, None].to(tl.int64) * sizes.strides[1]
        value = tl.load(numbers + places, mask=is_in, other=0.0)
    elif LAYOUT.name == "BLOCKS":
        B: tl.constexpr = LAYOUT.blocks
        rows = _block_rows(numbers, n, sizes)
        if B.half:
            value = _nibbles(rows, (n < sizes.outputs)[None, :], k_begin, sizes.inputs, B)
        else:
            block = rows[None, :] + (k // B.size * B.num_bytes)[:, None]
            NUMBERS: tl.constexpr = B.numbers
            value = _number(block, (k % B.size)[:, None], is_in, NUMBERS)
        value = _spread(scale) * value
        if B.offset >= 0:
            value = value + _spread(offset)
    else:
        number = _numbers(numbers, n_begin, k_begin, sizes, LAYOUT)
        if LAYOUT.kind == "E4M3":
            value = from_e4m3(number)
        elif LAYOUT.kind == "E2M1":
            value = from_e2m1(number)
        elif LAYOUT.kind == "SIGNED":
            value = number.to(tl.int8).to(tl.float32)
        elif zeros is None:
            value = (number - sizes.zero_offset).to(tl.float32)
        else:
            zero = _zeros(zeros, _group(order, k_begin, sizes, LAYOUT), n_begin, sizes, LAYOUT)
            value = (number - _spread(zero)).to(tl.float32)
        value = value * _spread(scale)
    return value


@triton.jit
def _write_out(
    tensors: tl.tuple,
    sizes: tl.tuple,
    out: tl.tensor,
    strides: tl.tuple,  # of `out`, by outputs and inputs
    LAYOUT: tl.constexpr,
    IS_BF16: tl.constexpr,
) -> None:
    k_begin, n_begin = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    scale = factors(tensors, sizes, n_begin, k_begin, LAYOUT)
    value = tile(tensors, sizes, scale, n_begin, k_begin, LAYOUT)
    k, n = (k_begin + tl.arange(0, TILE))[:, None], (n_begin + tl.arange(0, TILE))[None, :]
    cells = out + n.to(tl.int64) * strides[0] + k.to(tl.int64) * strides[1]
    tl.store(cells, rounded(value, IS_BF16, out), mask=(k < sizes.inputs) & (n < sizes.outputs))


def write(matrix: Matrix, out: torch.Tensor) -> None:
    """`Backend.write`."""
    tensors, sizes, layout = operands(matrix)
    grid = (-(-sizes.inputs // WIDTH), -(-sizes.outputs // WIDTH))
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}  # its default differs between versions
    _write_out[grid](tensors, sizes, bits_of(out), out.stride(), layout, out.dtype == torch.bfloat16, **options)


def operands(matrix: Matrix, alignment: int = 0) -> tuple[Tensors, Sizes, Layout]:
    """What kernels take of a matrix; or of several, whose numbers are aligned to so many bytes. Packed ones keep it."""
    if isinstance(matrix, torch.Tensor):
        (outputs, inputs), strides = matrix.shape, (matrix.stride(0), matrix.stride(1))
        return tensors_of(matrix), Sizes(outputs, inputs, strides), PLAIN
    kept: dict[Any, tuple[Tensors, Sizes, Layout]] = vars(matrix)
    if alignment not in kept:
        kept[alignment] = _operands(matrix, alignment)
    return kept[alignment]


def _operands(matrix: Packed, alignment: int) -> tuple[Tensors, Sizes, Layout]:
    tensors, sizes = tensors_of(matrix), Sizes(matrix.shape[0], matrix.shape[1])
    if isinstance(matrix, InBlocks):
        sizes = sizes._replace(words=matrix.data.shape[1], half=matrix.half)
        return tensors, sizes, Layout("BLOCKS", blocks=_block_layout(matrix))
    if isinstance(matrix, Along):
        return _along(matrix, sizes, alignment or math.gcd(16, matrix.numbers.data_ptr()))
    num_groups, is_across = len(matrix.scales), isinstance(matrix, Across)
    bits, zero_offset = (4, 0) if isinstance(matrix, Across) else (matrix.bits, matrix.zero_offset)
    sizes = sizes._replace(words=matrix.words.shape[1], num_groups=num_groups, group_size=sizes.inputs // num_groups)
    groups, name = _groups(sizes, tensors[3]), "ACROSS" if is_across else "DOWN"
    layout = Layout(name, bits=bits, per_word=32 // bits, groups=groups, factors=_when(sizes, groups))
    return tensors, sizes._replace(zero_offset=zero_offset), layout


def _along(matrix: Along, sizes: Sizes, alignment: int) -> tuple[Tensors, Sizes, Layout]:
    numbers, scales, zeros, order, bits, (height, width), whole, is_divided = matrix
    kind = KINDS.get(numbers.dtype, "UNSIGNED")
    scale_kind = {torch.float8_e8m0fnu: "E8M0", torch.float8_e4m3fn: "E4M3"}.get(scales.dtype, "")
    scales, numbers = scales.view(torch.uint8) if scale_kind else scales, numbers.view(torch.uint8)
    if bits == 4 and not (numbers.shape[1] % 4 or numbers.storage_offset() % 4 or alignment % 4):
        numbers = numbers.view(torch.int32)
    middle = 1 << (bits - 1) if zeros is None else 0
    sizes = sizes._replace(words=numbers.shape[1], num_groups=scales.shape[1], group_size=width)
    sizes = sizes._replace(height=height, zero_offset=middle)
    per_word = numbers.element_size() * 8 // bits
    groups = _groups(sizes, order)
    layout = Layout("ALONG", kind, bits, per_word, groups, scale_kind, is_divided, _when(sizes, groups))
    return (numbers, scales, zeros, order, whole), sizes, layout


def _when(sizes: Sizes, groups: int) -> str:
    """`Layout.factors`; registers have no room for those of each input."""
    return "ONCE" if sizes.num_groups == 1 else "EARLY" if groups < WIDTH else ""


def _groups(sizes: Sizes, order: torch.Tensor | None = None) -> int:
    """Number of groups of a tile's inputs; each input by itself if a tile has no whole groups."""
    if order is not None:
        return WIDTH
    if sizes.num_groups == 1 or sizes.group_size % WIDTH == 0:
        return 1
    return WIDTH // sizes.group_size if WIDTH % sizes.group_size == 0 else WIDTH


def _block_layout(matrix: InBlocks) -> BlockLayout:
    (size, num_bytes), type_ = matrix.size, matrix.type_
    numbers, scales, mins = (
        (*kind.low, *kind.high, kind.flip, kind.center, *_words(kind.codes))
        for kind in (type_.numbers, type_.scales, type_.mins)
    )
    low, group = type_.numbers.low, size // type_.num_groups
    is_nibbles = low.bits == 4 and not type_.numbers.high.bits and low.span == 2 * low.width == 2 * low.every
    half = low.width if is_nibbles else 0
    return BlockLayout(numbers, scales, mins, type_.scale, type_.offset, size, num_bytes, group, half)


def _words(codes: tuple[int, ...]) -> tuple[int, ...]:
    """16 signed bytes, each 128 more, as 32-bit integers; zeros if there are none."""
    bytes_ = bytes(code + 128 for code in codes) or bytes(16)
    return struct.unpack("<4i", bytes_)


def bits_of(out: torch.Tensor) -> torch.Tensor:
    """The tensor for kernels, with bfloat16 as integers, as `rounded` gives it."""
    return out.view(torch.int16) if out.dtype == torch.bfloat16 else out


PLAIN = Layout("PLAIN", factors="ONCE")
