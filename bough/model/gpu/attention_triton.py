"""Tree attention on a GPU: what `bough.model.cpu.attention_cpu` does on a CPU, as a Triton kernel.

One program takes a tile of rows of one slot, for one KV head. It reads what is committed before all of them once, and
then, row by row, what each has on its own path behind that. Every row's keys come in the order of their positions, in
blocks fixed by position, and all products have one shape; a block that a row does not see leaves it as it was. So a
row's result depends on its query and its path alone, bit for bit, whatever rows it shares a tile with. Keys and values
are read from the slot as they are stored; sums are in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from bough.model.batch.gpu_paths import TILE_ROWS, Paths

BLOCK = (
    32  # keys that share one step of the running softmax: with 64 a program would want more registers than there are
)
MIN_DOT = 16  # rows and columns that a tile of a GPU's matrix units has at least
TILE_QUERIES = 64  # rows times heads of a program, at most: its results stay in registers
NUM_STAGES = 2

# What changes from call to call must not be specialised on: each special case is a program of its own, with a rounding
# of its own.
_VARYING = ("tail_width", "window", "scale")


@triton.jit
def _scores(query, key, is_seen, scale, SOFTCAP: tl.constexpr, IN_HALVES: tl.constexpr):  # type: ignore[no-untyped-def]
    """(QUERIES, BLOCK) float32; -inf where a key is not to be seen."""
    if IN_HALVES:
        scores = tl.dot(query, tl.trans(key)) * scale
    else:
        scores = tl.dot(query.to(tl.float32), tl.trans(key.to(tl.float32)), input_precision="ieee") * scale
    if SOFTCAP > 0:
        scores = SOFTCAP * (1.0 - 2.0 / (tl.exp(scores * (2.0 / SOFTCAP)) + 1.0))  # tanh
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def _fold(scores, value, highest, total, result, IN_HALVES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Folds a block into the running softmax: its highest score, the sum of weights, and the weighted values.

    A row that sees nothing of it stays what it was: its decay is 1 and its weights are 0.
    """
    peak = tl.maximum(highest, tl.max(scores, 1))
    against = tl.where(peak == float("-inf"), 0.0, peak)  # a row that has seen nothing yet has no peak to subtract
    decay = tl.exp(highest - against)
    weights = tl.exp(scores - against[:, None])
    total = total * decay + tl.sum(weights, 1)
    result = result * decay[:, None]
    if IN_HALVES:  # a weight is the sum of two 16-bit numbers, as good as exactly
        high = weights.to(value.dtype)
        low = (weights - high.to(tl.float32)).to(value.dtype)
        result = tl.dot(low, value, tl.dot(high, value, result))
    else:
        result = tl.dot(weights, value.to(tl.float32), result, input_precision="ieee")
    return peak, total, result


@triton.jit
def _meet(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    rows,  # (BLOCK,) of the memory, at which the keys of a block stand
    is_there,  # (BLOCK,)
    is_seen,  # (QUERIES, BLOCK)
    kv_head,
    scale,
    highest,
    total,
    result,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IN_HALVES: tl.constexpr,
):
    """The running softmax when the queries have met a block of keys."""
    dims = tl.arange(0, DIM_PADDED)
    places = (rows[:, None] * NUM_KV_HEADS + kv_head) * HEAD_DIM + dims[None, :]
    is_number = is_there[:, None] & (dims < HEAD_DIM)[None, :]
    key = tl.load(keys + places, mask=is_number, other=0.0)
    scores = _scores(query, key, is_seen, scale, SOFTCAP, IN_HALVES)
    value = tl.load(values + places, mask=is_number, other=0.0)
    return _fold(scores, value, highest, total, result, IN_HALVES)


@triton.jit
def _part_of_tile(tile, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row and end of this program's rows: none, where the tile has fewer."""
    begin_row = tl.load(tile) + ROWS * tl.program_id(2)
    return begin_row, tl.minimum(tl.load(tile + 1), begin_row + ROWS)


@triton.jit
def _nothing_seen(sinks, is_head, query, HAS_SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The running softmax before any keys, but for a sink: highest scores, sums of weights, weighted values."""
    result = tl.zeros(query.shape, tl.float32)
    total = tl.zeros((query.shape[0],), tl.float32)
    highest = tl.full((query.shape[0],), float("-inf"), tl.float32)
    if HAS_SINKS:
        highest, total = tl.load(sinks, mask=is_head, other=0.0), total + 1.0
    return highest, total, result


@triton.jit
def _rows_of(tail, positions, base, origin, is_near):  # type: ignore[no-untyped-def]
    """(BLOCK,) int64 of the memory, where the keys at some positions of one path stand."""
    in_tail = is_near & (positions >= base)
    tail_rows = tl.load(tail + (positions - base), mask=in_tail, other=0)
    return tl.where(in_tail, tail_rows, origin + positions).to(tl.int64)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING)
def _attend(  # type: ignore[no-untyped-def]
    queries,  # (num_rows, num_heads, head_dim)
    keys,  # (num_memory_rows, num_kv_heads, head_dim)
    values,  # likewise
    origins,  # these five as in `Paths`
    bases,
    lengths,
    tails,
    tiles,
    sinks,  # (num_heads,) float32, or anything where HAS_SINKS is not set
    out,  # as queries
    tail_width,
    scale,
    window,  # 0 is off
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0 is off
    HAS_SINKS: tl.constexpr,
    IN_HALVES: tl.constexpr,  # 16-bit keys meet 16-bit queries: their products are exact in float32
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
    GROUP_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    kv_head = tl.program_id(1)
    begin_row, end_row = _part_of_tile(tiles + 2 * tl.program_id(0), ROWS)
    lanes, dims, steps = tl.arange(0, ROWS * GROUP_PADDED), tl.arange(0, DIM_PADDED), tl.arange(0, BLOCK)
    row, head = begin_row + lanes // GROUP_PADDED, lanes % GROUP_PADDED
    is_row, is_any = row < end_row, begin_row < end_row  # the rows of a tile are of one slot
    is_cell = (is_row & (head < GROUP))[:, None] & (dims < HEAD_DIM)[None, :]
    cells = ((row * NUM_KV_HEADS + kv_head) * GROUP + head)[:, None].to(tl.int64) * HEAD_DIM + dims[None, :]
    query = tl.load(queries + cells, mask=is_cell, other=0.0)
    length = tl.load(lengths + row, mask=is_row, other=0)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    longest, earliest = tl.max(length, 0), tl.min(tl.where(is_row, first, 2147483647), 0)
    origin = tl.load(origins + begin_row, mask=is_any, other=0).to(tl.int64)
    base = tl.load(bases + begin_row, mask=is_any, other=0)
    has_tails = longest > base
    shared = tl.where(has_tails, base // BLOCK * BLOCK, longest)  # whole blocks before all rows' own keys
    highest, total, result = _nothing_seen(sinks + kv_head * GROUP + head, head < GROUP, query, HAS_SINKS)
    for begin in range(earliest // BLOCK * BLOCK, shared, BLOCK):
        positions = begin + steps
        is_seen = (positions[None, :] >= first[:, None]) & (positions[None, :] < length[:, None])
        is_there = (positions >= earliest) & (positions < longest)
        state = (query, keys, values, origin + positions, is_there, is_seen, kv_head, scale, highest, total, result)
        highest, total, result = _meet(*state, NUM_KV_HEADS, HEAD_DIM, DIM_PADDED, SOFTCAP, IN_HALVES)
    for own in range(begin_row, tl.where(has_tails, end_row, begin_row)):
        own_length, is_own = tl.load(lengths + own), row == own
        own_first = tl.where(window > 0, tl.maximum(own_length - window, 0), 0)
        for begin in tl.range(tl.maximum(shared, own_first // BLOCK * BLOCK), own_length, BLOCK, num_stages=1):
            is_near = (begin + steps >= own_first) & (begin + steps < own_length)
            rows = _rows_of(tails + own * tail_width, begin + steps, base, origin, is_near)
            is_seen = is_own[:, None] & is_near[None, :]
            state = (query, keys, values, rows, is_near, is_seen, kv_head, scale, highest, total, result)
            peak, weight, sums = _meet(*state, NUM_KV_HEADS, HEAD_DIM, DIM_PADDED, SOFTCAP, IN_HALVES)
            highest, total = tl.where(is_own, peak, highest), tl.where(is_own, weight, total)
            result = tl.where(is_own[:, None], sums, result)  # another's may be no numbers: 0 times NaN is NaN
    total = tl.where(total == 0.0, 1.0, total)  # of lanes that are no row's
    tl.store(out + cells, (result / total[:, None]).to(out.dtype.element_ty), mask=is_cell)


def attend_by_triton(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    paths: Paths,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of every row over its path; shapes as in `_attend`, any floating types."""
    out = torch.empty_like(queries)
    _, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    in_halves = _in_halves(queries.dtype, keys.dtype)
    constants = tile_constants(num_heads // num_kv_heads, head_dim, in_halves)
    _attend[(len(paths.tiles), num_kv_heads, TILE_ROWS // constants["ROWS"])](
        queries,
        keys,
        values,
        paths.origins,
        paths.bases,
        paths.lengths,
        paths.tails,
        paths.tiles,
        queries if sinks is None else sinks,
        out,
        paths.tails.shape[1],
        scale,
        window,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        SOFTCAP=float(softcap),
        HAS_SINKS=sinks is not None,
        IN_HALVES=in_halves,
        **constants,
        **launch_options(constants, in_halves),
    )
    return out


def tile_constants(group: int, head_dim: int, in_halves: bool) -> dict[str, int]:
    """Of a program, by the shapes of a model alone: rows that are many or few are computed by one program."""
    dim_padded, group_padded = max(MIN_DOT, triton.next_power_of_2(head_dim)), triton.next_power_of_2(group)
    most = min(TILE_QUERIES, TILE_QUERIES * 128 // dim_padded) if in_halves else MIN_DOT
    if TILE_ROWS * group_padded < most:  # what is between spills registers
        most = MIN_DOT
    rows = min(TILE_ROWS, max(1, max(most, MIN_DOT) // group_padded))
    return {
        "GROUP": group,
        "BLOCK": BLOCK,
        "ROWS": rows,
        "GROUP_PADDED": max(group_padded, MIN_DOT // rows),
        "DIM_PADDED": dim_padded,
    }


def launch_options(constants: dict[str, int], in_halves: bool) -> dict[str, object]:
    """What the compiler is told, by the shapes of a model alone as `tile_constants` are.

    Warps: so many that no family's kernel spills registers (`python -m loadtest.gpu.compile_kernels`); a small tile
    among many warps spills as a large one among few does. Float32 tiles fill the shared memory of a small GPU as they
    are. Versions of Triton differ in their default of fusing products and sums, and so would the bits.
    """
    tile = constants["ROWS"] * constants["GROUP_PADDED"] * constants["DIM_PADDED"]
    num_warps = min(8, max(1, tile // 512)) if in_halves else 4
    return {"num_warps": num_warps, "num_stages": NUM_STAGES if in_halves else 1, "enable_fp_fusion": True}


def _in_halves(query_dtype: torch.dtype, key_dtype: torch.dtype) -> bool:
    """Whether matrix units may take the numbers as they are; Triton's interpreter cannot multiply bfloat16."""
    is_interpreted = isinstance(_attend, InterpretedFunction)
    halves = (torch.float16,) if is_interpreted else (torch.float16, torch.bfloat16)
    return query_dtype == key_dtype and key_dtype in halves
