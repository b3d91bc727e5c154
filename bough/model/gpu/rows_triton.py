"""Norms, rotary embeddings, gated activations and sums of experts' outputs on a GPU, one Triton kernel for each.

Intermediate numbers are rounded where torch's operators round them. A program computes the sum over a row, in an order
that depends on the row's width alone; everything else is computed number by number. So a row's bits do not depend on
the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bough.model.backend import Norm, Rotary, Table
from bough.model.gpu.unpack_triton import nearest
from bough.model.packed import ExpertTiles

ALIGNED = 16  # bytes: rows that begin elsewhere are copied, as their program might add in another order
NUMBERS_PER_WARP = 512  # of a norm's row
MOST_WARPS = 16
TILE_NUMBERS = 1024  # of a program without sums
OPTIONS = {"enable_fp_fusion": False}  # as operators of torch do not fuse; the default differs between versions
_VARYING = ("stride", "gate_stride")  # of the same rows in a tensor of their own, or as part of a larger one


@triton.jit
def _silu(value: tl.tensor) -> tl.tensor:
    return tl.div_rn(value, 1.0 + tl.exp(-value))


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING)
def norm_row(
    rows: tl.tensor,  # (num_rows, WIDTH)
    gates: tl.tensor,  # as `rows`; used with HAS_GATE
    weights: tl.tensor,  # (NUM_WEIGHTS, WIDTH), by turns
    out: tl.tensor,  # (num_rows, WIDTH)
    stride: tl.tensor,
    gate_stride: tl.tensor,
    epsilon: tl.tensor,
    WIDTH: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    IS_ROUNDED: tl.constexpr,  # as the fields of `Norm`
    IS_CENTRED: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    DIVISOR: tl.constexpr,  # of both strides
) -> None:
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_in = columns < WIDTH
    value = tl.load(rows + tl.multiple_of(row * stride, DIVISOR) + columns, mask=is_in, other=0.0).to(tl.float32)
    if IS_CENTRED:
        value = tl.where(is_in, value - tl.div_rn(tl.sum(value, 0), 1.0 * WIDTH), 0.0)
    mean = tl.div_rn(tl.sum(value * value, 0), 1.0 * WIDTH)
    value = value * tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon))
    weight = tl.load(weights + row % NUM_WEIGHTS * WIDTH + columns, mask=is_in, other=0.0).to(tl.float32)
    if ADDS_ONE:
        weight = weight + 1.0
    value = nearest(weight * nearest(value, rows), weights) if IS_ROUNDED else nearest(weight * value, out)
    if HAS_GATE:
        gate = tl.load(gates + tl.multiple_of(row * gate_stride, DIVISOR) + columns, mask=is_in, other=0.0)
        value = nearest(value * _silu(gate.to(tl.float32)), out)
    tl.store(out + row * WIDTH + columns, value.to(out.dtype.element_ty), mask=is_in)


def norm(
    rows: torch.Tensor, weight: torch.Tensor, epsilon: float, kind: Norm, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """`Backend.norm`."""
    width = rows.shape[-1]
    if kind.is_rounded:
        weight = weight.to(torch.promote_types(rows.dtype, weight.dtype))
    dtype = weight.dtype if kind.is_rounded and gate is None else rows.dtype
    out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    divisor = min(ALIGNED // rows.dtype.itemsize, width & -width)
    flat = _flat(rows, divisor)
    gates = flat if gate is None else _flat(gate, divisor)
    constants = {"WIDTH": width, "NUM_WEIGHTS": weight.numel() // width, "HAS_GATE": gate is not None}
    constants |= {"IS_ROUNDED": kind.is_rounded, "IS_CENTRED": kind.is_centred, "ADDS_ONE": kind.adds_one}
    block = triton.next_power_of_2(width)
    num_warps = min(MOST_WARPS, max(1, block // NUMBERS_PER_WARP))
    numbers = flat.stride(0), gates.stride(0), epsilon
    norm_row[(len(flat),)](
        flat, gates, weight, out, *numbers, **constants, BLOCK=block, DIVISOR=divisor, num_warps=num_warps, **OPTIONS
    )
    return out


def _flat(rows: torch.Tensor, divisor: int) -> torch.Tensor:
    """Rows (num_rows, width), copied if they do not begin at multiples of `divisor` numbers and `ALIGNED` bytes."""
    flat = rows.reshape(-1, rows.shape[-1])
    is_aligned = flat.stride(1) == 1 and flat.stride(0) % divisor == 0 and flat.data_ptr() % ALIGNED == 0
    return flat if is_aligned else flat.clone(memory_format=torch.contiguous_format)


@triton.jit
def turn_row(
    queries: tl.tensor,  # (num_rows, NUM_QUERIES, WIDTH), as `keys`
    keys: tl.tensor,
    cos: tl.tensor,  # (num_rows, numbers of a table)
    sin: tl.tensor,
    turned_queries: tl.tensor,
    turned_keys: tl.tensor,
    query_row: tl.tensor,  # strides of a row and of a head
    query_head: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    cos_row: tl.tensor,
    sin_row: tl.tensor,
    NUM_QUERIES: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,  # numbers of a head that turn; the rest is copied
    IN_PAIRS: tl.constexpr,  # as the fields of `Rotary`
    OUT_PAIRS: tl.constexpr,
    STEP: tl.constexpr,  # from a pair's number in a table to the next pair's
    SECOND: tl.constexpr,  # from a pair's first number to its second
    IS_WIDE: tl.constexpr,  # products are not rounded
    HEADS: tl.constexpr,  # of a program
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    HALF: tl.constexpr = TURNED // 2
    row, head = tl.program_id(0).to(tl.int64), (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    key, is_head, j = head - NUM_QUERIES, head < NUM_QUERIES + NUM_KEYS, tl.arange(0, BLOCK)[None, :]
    of_query, of_key = queries + row * query_row + head * query_head, keys + row * key_row + key * key_head
    from_ = tl.where(key < 0, of_query, of_key)
    of_query, of_key = (row * NUM_QUERIES + head) * WIDTH, (row * NUM_KEYS + key) * WIDTH
    to = tl.where(key < 0, turned_queries + of_query, turned_keys + of_key)
    is_pair, is_in = j < HALF, is_head & (j < HALF)
    cos, sin = cos + row * cos_row + STEP * j, sin + row * sin_row + STEP * j
    first = tl.load(from_ + (2 * j if IN_PAIRS else j), mask=is_in, other=0.0).to(tl.float32)
    second = tl.load(from_ + (2 * j + 1 if IN_PAIRS else j + HALF), mask=is_in, other=0.0).to(tl.float32)
    first_cos = first * tl.load(cos, mask=is_pair, other=0.0).to(tl.float32)
    second_sin = second * tl.load(sin, mask=is_pair, other=0.0).to(tl.float32)
    second_cos = second * tl.load(cos + SECOND, mask=is_pair, other=0.0).to(tl.float32)
    first_sin = first * tl.load(sin + SECOND, mask=is_pair, other=0.0).to(tl.float32)
    if not IS_WIDE:
        first_cos, second_sin = nearest(first_cos, turned_keys), nearest(second_sin, turned_keys)
        second_cos, first_sin = nearest(second_cos, turned_keys), nearest(first_sin, turned_keys)
    first = nearest(first_cos - second_sin, turned_keys).to(to.dtype.element_ty)
    second = nearest(second_cos + first_sin, turned_keys).to(to.dtype.element_ty)
    tl.store(to + (2 * j if OUT_PAIRS else j), first, mask=is_in)
    tl.store(to + (2 * j + 1 if OUT_PAIRS else j + HALF), second, mask=is_in)
    if WIDTH > TURNED:
        rest = TURNED + tl.arange(0, REST)[None, :]
        tl.store(to + rest, tl.load(from_ + rest, mask=is_head & (rest < WIDTH)), mask=is_head & (rest < WIDTH))


def rotate(
    queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kind: Rotary
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Backend.rotate`; a row's heads are side by side in the memory of the results."""
    width, is_whole = queries.shape[-1], kind.table is Table.WHOLE
    turned = cos.shape[-1] * (2 if kind.table is Table.HALF else 1)
    is_wide = kind.is_wide or torch.promote_types(queries.dtype, cos.dtype) != queries.dtype
    step, second = (2, 1) if is_whole and kind.in_pairs else (1, turned // 2 if is_whole else 0)
    cos, sin, queries, keys = (x if x.stride(-1) == 1 else x.contiguous() for x in (cos, sin, queries, keys))
    by_row = [x.transpose(1, 2) for x in (queries, keys)]
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in by_row]
    strides = [x.stride(axis) for x in by_row for axis in (1, 2)] + [cos.stride(1), sin.stride(1)]
    block, (num_queries, num_keys) = triton.next_power_of_2(turned // 2), (x.shape[2] for x in by_row)
    heads = max(1, TILE_NUMBERS // triton.next_power_of_2(width))
    constants = {"NUM_QUERIES": num_queries, "NUM_KEYS": num_keys, "WIDTH": width, "TURNED": turned, "STEP": step}
    constants |= {"IN_PAIRS": kind.in_pairs, "OUT_PAIRS": kind.out_pairs, "SECOND": second, "IS_WIDE": is_wide}
    constants |= {"HEADS": heads, "BLOCK": block, "REST": triton.next_power_of_2(max(1, width - turned))}
    grid = queries.shape[2], triton.cdiv(num_queries + num_keys, heads)
    turn_row[grid](*by_row, cos, sin, *outs, *strides, **constants, **OPTIONS)
    return outs[0].transpose(1, 2), outs[1].transpose(1, 2)


@triton.jit
def gate_row(
    gates: tl.tensor,  # (num_rows, width)
    ups: tl.tensor,
    out: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    width: tl.tensor,
    IS_SILU: tl.constexpr,  # or GELU by tanh
    BLOCK: tl.constexpr,
) -> None:
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < width
    gate = tl.load(gates + row * gate_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(ups + row * up_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    if IS_SILU:
        gate = _silu(gate)
    else:  # (1 + tanh(x)) / 2 is the logistic function of 2 x, 2 * sqrt(2 / pi) is 1.5957691216057308
        gate = tl.div_rn(gate, 1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    product = nearest(nearest(gate, out) * up, out)
    tl.store(out + row * width + columns, product.to(out.dtype.element_ty), mask=is_in)


def gate(gates: torch.Tensor, ups: torch.Tensor, activation: str) -> torch.Tensor:
    """`Backend.gate`."""
    out, width = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device), gates.shape[-1]
    flat = [numbers.reshape(-1, width) for numbers in (gates, ups)]
    grid = len(flat[0]), triton.cdiv(width, TILE_NUMBERS)
    numbers = flat[0].stride(0), flat[1].stride(0), width
    gate_row[grid](*flat, out, *numbers, IS_SILU=activation == "silu", BLOCK=TILE_NUMBERS, **OPTIONS)
    return out


@triton.jit
def combine_row(
    made: tl.tensor,  # (num_entries, width)
    entries: tl.tensor,  # (num_rows * CHOICES,) int32: each choice's
    chosen: tl.tensor,  # (num_rows, CHOICES) experts, as `weights`
    weights: tl.tensor,
    out: tl.tensor,  # (num_rows, width)
    width: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, choice, is_in = row * CHOICES, tl.arange(0, PADDED), columns < width
    experts = tl.load(chosen + first + choice, mask=choice < CHOICES, other=NUM_EXPERTS).to(tl.int32)
    keys, total = experts * PADDED + choice, tl.zeros((BLOCK,), tl.float32)
    for _ in tl.static_range(CHOICES):
        key = tl.min(keys, 0)
        at, is_there = first + key % PADDED, key < NUM_EXPERTS * PADDED
        keys = tl.where(keys == key, NUM_EXPERTS * PADDED, keys)
        entry, weight = tl.load(entries + at), tl.load(weights + at).to(tl.float32)
        value = tl.load(made + entry.to(tl.int64) * width + columns, mask=is_in & is_there, other=0.0).to(tl.float32)
        total = nearest(total + tl.where(is_there, nearest(value * weight, out), 0.0), out)
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=is_in)


def combine(
    made: torch.Tensor, tiles: ExpertTiles, chosen: torch.Tensor, weights: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """`Backend.combine`."""
    (num_rows, k), width = chosen.shape, made.shape[1]
    out = made.new_empty(num_rows, width)
    sizes = {"NUM_EXPERTS": num_experts, "CHOICES": k, "PADDED": triton.next_power_of_2(k), "BLOCK": TILE_NUMBERS}
    grid = num_rows, triton.cdiv(width, TILE_NUMBERS)
    combine_row[grid](
        made.contiguous(), tiles.entries, chosen.contiguous(), weights.contiguous(), out, width, **sizes, **OPTIONS
    )
    return out
