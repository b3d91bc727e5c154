"""Products of any number of rows with matrices in memory, plain or packed, in which no row's bits depend on others.

A program adds up all inputs of a tile of outputs in order, always with the same tile of inputs and outputs. Only the
number of its rows varies, which a tensor core's instruction does not see: it multiplies each row alone. On GPUs whose
instructions are for 64 rows (wgmma) a program always has at least as many. A packed matrix is unpacked in registers, to
the bits that it is written out with, so its products have the bits of the plain matrix's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction

from bough.model.gpu.unpack_triton import TILE, WIDTH, Layout, bits_of, factors, nearest, operands, rounded, tile
from bough.model.packed import ExpertTiles, Matrix, Stack

LEAST_ROWS, MOST_ROWS, MOST_FLOAT32_ROWS = 16, 128, 32  # rows of a program
WARP_GROUPS = (9, 10, 11)  # major capabilities with instructions for 64 rows
OPTIONS = {16: (4, 4), 32: (4, 4), 64: (4, 3), 128: (8, 3)}  # warps and stages, by rows of a program
MOST_REGISTERS = 255  # of a thread: the assembler would rather spill some to run more programs at once
ENTRIES = 1024  # of a program
_VARYING = ("num_rows",)  # must not be specialised on, see `attention_triton`


@triton.jit
def _own(pointer: tl.tensor, addresses: tl.tensor, PLACE: tl.constexpr, ALIGNMENT: tl.constexpr) -> tl.tensor:
    """An expert's tensor of the type of `pointer`."""
    return tl.multiple_of(tl.load(addresses + PLACE).to(pointer.dtype), ALIGNMENT)


@triton.jit
def _operand(value: tl.tensor, rows: tl.tensor, IN_HALVES: tl.constexpr) -> tl.tensor:
    """Weights in the type to multiply in, with the bits that writing out gives."""
    return value.to(rows.dtype.element_ty) if IN_HALVES else nearest(value.to(tl.float32), rows)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING)
def _multiply(
    rows: tl.tensor,  # (heads, num_rows, inputs)
    tensors: tl.tuple,
    sizes: tl.tuple,
    bias: tl.tensor,  # (outputs,) or None
    out: tl.tensor,  # (heads, num_rows, outputs)
    strides: tl.tuple,  # of `rows` by heads and rows, of `out` likewise, and of the matrix by heads
    num_rows: tl.tensor,
    places: tl.tensor,  # (num_rows of `out`,) int32: which of `rows`; None: all in order
    tiles: tl.tensor,  # (num_tiles, 3) int32: expert, first row of `out`, end; empty ones are not computed; or None
    addresses: tl.tensor,  # (experts, 6) int64: of each expert's tensors and bias; used with `tiles`
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    IN_HALVES: tl.constexpr,  # tensor cores multiply in 16 bits
    IS_BF16: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # of addresses
) -> None:
    begin, end = tl.program_id(0) * BLOCK_M, num_rows
    if tiles is not None:
        entry = tiles + 3 * tl.program_id(0)
        own, begin, end = addresses + 6 * tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        if begin >= end:
            return
        numbers, scales, zeros, order, whole = tensors
        numbers = _own(numbers, own, 0, ALIGNMENT)
        if scales is not None:
            scales = _own(scales, own, 1, ALIGNMENT)
        if zeros is not None:
            zeros = _own(zeros, own, 2, ALIGNMENT)
        if order is not None:
            order = _own(order, own, 3, ALIGNMENT)
        if whole is not None:
            whole = _own(whole, own, 4, 4)
        if bias is not None:
            bias = _own(bias, own, 5, 2)
        tensors = (numbers, scales, zeros, order, whole)
    n_begin, head = tl.program_id(1) * TILE, tl.program_id(2).to(tl.int64)
    m, n, steps = begin + tl.arange(0, BLOCK_M), n_begin + tl.arange(0, TILE), tl.arange(0, TILE)
    is_row = (m < end)[:, None]
    source = m if places is None else tl.load(places + m, mask=m < end, other=0)
    own_rows = rows + head * strides[0] + source[:, None].to(tl.int64) * strides[1]
    if LAYOUT.name == "PLAIN":
        tensors = (tensors[0] + head * strides[4], None, None, None, None)
    sums = tl.zeros((BLOCK_M, TILE), tl.float32)
    scale = factors(tensors, sizes, n_begin, 0, LAYOUT)
    for k_begin in range(0, sizes.inputs, TILE):
        k = (k_begin + steps)[None, :]
        row = tl.load(own_rows + k, mask=is_row & (k < sizes.inputs), other=0.0)
        if LAYOUT.factors == "":
            scale = factors(tensors, sizes, n_begin, k_begin, LAYOUT)
        weights = tile(tensors, sizes, scale, n_begin, k_begin, LAYOUT)
        if LAYOUT.factors == "EARLY":
            scale = factors(tensors, sizes, n_begin, k_begin + TILE, LAYOUT)
        weights = _operand(weights, rows, IN_HALVES)
        sums = tl.dot(row if IN_HALVES else row.to(tl.float32), weights, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + n, mask=n < sizes.outputs, other=0.0).to(tl.float32)[None, :]
    cells = out + head * strides[2] + m[:, None].to(tl.int64) * strides[3] + n[None, :]
    tl.store(cells, rounded(sums, IS_BF16, out), mask=is_row & (n < sizes.outputs)[None, :])


def multiply(rows: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`Backend.multiply`."""
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    out = rows.new_empty(len(flat), matrix.shape[0])
    tensors, sizes, layout = operands(matrix)
    strides = (0, flat.shape[1], 0, out.shape[1], 0)
    count = _rows_of_program(len(flat), rows.dtype)
    grid = (-(-len(flat) // count), -(-sizes.outputs // WIDTH), 1)
    operands_ = flat, tensors, sizes, bias, bits_of(out), strides, len(flat), None, None, None
    if len(flat):
        _multiply[grid](*operands_, layout, **_constants(count, rows.dtype, layout))
    return out.view(*rows.shape[:-1], out.shape[1])


def linear_by_head(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """`Backend.linear_by_head`."""
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    (heads, num_rows, _), outputs = rows.shape, matrices.shape[1]
    out = rows.new_empty(num_rows, heads, outputs)
    _, sizes, layout = operands(matrices[0])
    strides = (*rows.stride()[:2], outputs, heads * outputs, matrices.stride(0))
    count = _rows_of_program(num_rows, rows.dtype)
    grid = (-(-num_rows // count), -(-outputs // WIDTH), heads)
    operands_ = rows, (matrices, None, None, None, None), sizes, None, bits_of(out), strides, num_rows, None, None, None
    if num_rows:
        _multiply[grid](*operands_, layout, **_constants(count, rows.dtype, layout))
    return out


def multiply_grouped(rows: torch.Tensor, stack: Stack, tiles: ExpertTiles, is_sorted: bool = False) -> torch.Tensor:
    """`Backend.multiply_grouped`."""
    rows, num_rows, table = rows.contiguous(), len(tiles.places), tiles.table
    tensors, sizes, layout = operands(stack.first, stack.alignment)
    out = rows.new_empty(num_rows, sizes.outputs)
    strides = (0, rows.shape[1], 0, out.shape[1], 0)
    count = rows_of_tile(num_rows, len(stack.addresses))
    if rows.dtype == torch.float32 and count > MOST_FLOAT32_ROWS:
        table, count = _cut(table, count, MOST_FLOAT32_ROWS), MOST_FLOAT32_ROWS
    grid = (len(table), -(-sizes.outputs // WIDTH), 1)
    places = None if is_sorted else tiles.places
    operands_ = rows, tensors, sizes, stack.bias, bits_of(out), strides, num_rows, places, table, stack.addresses
    constants = _constants(count, rows.dtype, layout)
    if num_rows:
        _multiply[grid](*operands_, layout, **constants | {"ALIGNMENT": stack.alignment})
    return out


def _cut(table: torch.Tensor, most: int, fewer: int) -> torch.Tensor:
    """The table of `ExpertTiles` whose tiles have at most `fewer` entries instead of `most`."""
    begins = table[:, 1:2] + torch.arange(0, most, fewer, dtype=table.dtype, device=table.device)
    ends = table[:, 2:]
    parts = table[:, :1].expand_as(begins), begins.minimum(ends), (begins + fewer).minimum(ends)
    return torch.stack(parts, 2).view(-1, 3)


@triton.jit
def _num_below(numbers: tl.tensor, num_entries: tl.tensor, limits: tl.tensor) -> tl.tensor:
    """How many of sorted numbers are below each limit, by binary search."""
    low = tl.zeros(limits.shape, tl.int32)
    high = low + num_entries
    for _ in range(32):
        middle = (low + high) // 2
        is_below = tl.load(numbers + middle, mask=low < high, other=0) < limits
        low, high = tl.where((low < high) & is_below, middle + 1, low), tl.where(is_below, high, middle)
    return low


@triton.jit(do_not_specialize=["num_entries", "num_tiles"])
def _expert_tiles(
    numbers: tl.tensor,  # (num_entries,): each one's expert, sorted
    choices: tl.tensor,  # (num_entries,): its index among all choices
    table: tl.tensor,  # (num_tiles, 3) int32
    places: tl.tensor,  # (num_entries,) int32, as `entries`
    entries: tl.tensor,
    num_entries: tl.tensor,
    num_tiles: tl.tensor,
    num_experts: tl.tensor,
    CHOICES: tl.constexpr,  # of a row
    EXPERTS: tl.constexpr,  # padded
    ROWS: tl.constexpr,  # most entries of a tile
    BLOCK: tl.constexpr,
) -> None:
    """The table by the first program, which leaves places and entries to the others."""
    if tl.program_id(0) > 0:
        entry = (tl.program_id(0) - 1) * BLOCK + tl.arange(0, BLOCK)
        choice = tl.load(choices + entry, mask=entry < num_entries, other=0)
        tl.store(places + entry, (choice // CHOICES).to(tl.int32), mask=entry < num_entries)
        tl.store(entries + choice, entry, mask=entry < num_entries)
        return
    expert = tl.arange(0, EXPERTS)
    begin, end = _num_below(numbers, num_entries, expert), _num_below(numbers, num_entries, expert + 1)
    counts = tl.where(expert < num_experts, (end - begin + ROWS - 1) // ROWS, 0)
    first = tl.cumsum(counts, 0) - counts
    for number in range(tl.max(counts, 0)):
        cells, is_own = table + 3 * (first + number), number < counts
        tl.store(cells, expert, mask=is_own)
        tl.store(cells + 1, begin + number * ROWS, mask=is_own)
        tl.store(cells + 2, tl.minimum(begin + (number + 1) * ROWS, end), mask=is_own)
    for unused in range(tl.sum(counts, 0), num_tiles, EXPERTS):
        for part in tl.static_range(3):
            tl.store(table + 3 * (unused + expert) + part, tl.zeros_like(expert), mask=unused + expert < num_tiles)


def expert_tiles(numbers: torch.Tensor, choices: torch.Tensor, k: int, num_experts: int) -> ExpertTiles:
    """Of the sorted experts of all entries, and the place of each among all choices, `k` of a row."""
    count, most = len(numbers), rows_of_tile(len(numbers), num_experts)
    table = numbers.new_empty(min(count, count // most + num_experts), 3, dtype=torch.int32)
    tiles = ExpertTiles(table, *(numbers.new_empty(count, dtype=torch.int32) for _ in range(2)))
    sizes, constants = (count, len(table), num_experts), (k, triton.next_power_of_2(num_experts), most, ENTRIES)
    if count:
        _expert_tiles[(1 + triton.cdiv(count, ENTRIES),)](numbers, choices, *tiles, *sizes, *constants)
    return tiles


def rows_of_tile(num_entries: int, num_experts: int) -> int:
    """Most entries of one of an expert's tiles."""
    return _rows_of_program(num_entries // num_experts, torch.bfloat16)


def _rows_of_program(num_rows: int, dtype: torch.dtype) -> int:
    """The next power of two, without Triton's functions: they take microseconds, and a sweep has thousands of calls.

    In float32 there are no tensor cores' instructions, and sums of more rows would not fit in registers.
    """
    least, most = (LEAST_ROWS, MOST_FLOAT32_ROWS) if dtype == torch.float32 else (_least_rows(), MOST_ROWS)
    return min(most, max(least, 1 << max(0, num_rows - 1).bit_length()))


def _least_rows() -> int:
    if isinstance(_multiply, InterpretedFunction):
        return LEAST_ROWS
    device = driver.active.get_current_device()
    if device not in _least_on:
        capability = int(driver.active.get_current_target().arch)
        _least_on[device] = 64 if capability // 10 in WARP_GROUPS else LEAST_ROWS
    return _least_on[device]


_least_on: dict[int, int] = {}  # by device


def _constants(num_rows: int, dtype: torch.dtype, layout: Layout) -> dict[str, object]:
    """Constants and options of a program, by its rows.

    Scales of each input, and numbers in several places, leave registers for fewer stages.
    """
    is_bf16 = dtype == torch.bfloat16
    in_halves = dtype == torch.float16 or (is_bf16 and not isinstance(_multiply, InterpretedFunction))
    num_warps, num_stages = OPTIONS[num_rows]
    num_stages = 2 if not layout.factors or (layout.blocks and not layout.blocks.half) else num_stages
    constants: dict[str, object] = {"BLOCK_M": num_rows, "IN_HALVES": in_halves}
    constants |= {"IS_BF16": is_bf16, "ALIGNMENT": 16, "num_warps": num_warps}
    if layout.blocks:
        constants["maxnreg"] = MOST_REGISTERS
    return constants | {"num_stages": num_stages if in_halves else 1, "enable_fp_fusion": False}
