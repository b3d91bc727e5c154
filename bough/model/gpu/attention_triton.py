"""Tree attention on a GPU as a Triton kernel, the counterpart of `bough.model.cpu.attention_kernel`.

A program computes a tile of rows of one slot for one KV head. It reads the committed keys once for all rows, and then
for each row the keys on its own path. Each row visits its keys in the order of their positions, in blocks fixed by
position, and all products have the same shape; a block that a row does not see leaves its state unchanged. So a row's
result depends only on its query and its path, bit for bit, in any tile. Keys and values are read from the slot as
stored; sums are in float32. In latent attention, keys contain their value as a second part: it is read once for both,
and the one KV head is computed as several, of some query heads each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from bough.model.batch.path_spans import TILE_ROWS, Paths

# Arguments that vary between calls must not be specialised on: each specialisation is another program, which may round
# differently.
_VARYING = ("tail_width", "window", "scale")
BLOCK = 32  # keys in one step of the online softmax; 64 would exceed the registers
MIN_DOT = 16  # least rows and columns of a tensor core's tile
TILE_QUERIES = 64  # most rows times heads of a program: its results must stay in registers
NUM_STAGES = 2


def heads_together(num_heads: int) -> int:
    """How many heads of latent attention one program computes: all that fill a tensor core's tile without remainder."""
    return max(size for size in range(1, MIN_DOT + 1) if num_heads % size == 0)


def tile_constants(group: int, head_dim: int, in_halves: bool, key_dim: int = 0) -> dict[str, int]:
    """Compile-time constants, which depend only on the model: few and many rows use the same program."""
    dim_padded, group_padded = max(MIN_DOT, triton.next_power_of_2(head_dim)), triton.next_power_of_2(group)
    most = min(TILE_QUERIES, TILE_QUERIES * 128 // dim_padded) if in_halves else MIN_DOT
    if TILE_ROWS * group_padded < most:  # a tile between both sizes would spill registers
        most = MIN_DOT
    rows = min(TILE_ROWS, max(1, max(most, MIN_DOT) // group_padded))
    return {
        "GROUP": group,
        "BLOCK": BLOCK,
        "ROWS": rows,
        "GROUP_PADDED": max(group_padded, MIN_DOT // rows),
        "DIM_PADDED": dim_padded,
        "KEY_DIM": key_dim,
        "KEY_PADDED": max(MIN_DOT, triton.next_power_of_2(key_dim)),
    }


def launch_options(constants: dict[str, int], in_halves: bool) -> dict[str, object]:
    """Compiler options, which depend only on the model, as `tile_constants` do.

    No family's kernel spills registers with so many warps (`python -m loadtest.gpu.compile_kernels`): small tiles spill
    with many warps, large ones with few, and heads of 256 with 8. Float32 uses one stage, as its tiles fill the shared
    memory of a small GPU.
    Fusing of products and sums is set, because its default differs between versions of Triton, and with it the bits.
    """
    tile = constants["ROWS"] * constants["GROUP_PADDED"] * constants["DIM_PADDED"]
    most = 4 if constants["DIM_PADDED"] == 256 else 8
    num_warps = min(most, max(1, tile // 512)) if in_halves else 4
    return {"num_warps": num_warps, "num_stages": NUM_STAGES if in_halves else 1, "enable_fp_fusion": True}


@triton.jit
def product(query: tl.tensor, key: tl.tensor, IN_HALVES: tl.constexpr) -> tl.tensor:
    """Products (QUERIES, BLOCK) float32."""
    if IN_HALVES:
        return tl.dot(query, tl.trans(key))
    return tl.dot(query.to(tl.float32), tl.trans(key.to(tl.float32)), input_precision="ieee")


@triton.jit
def seen_scores(scores: tl.tensor, is_seen: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Scores (QUERIES, BLOCK) capped; -inf for keys that a query does not see."""
    if SOFTCAP > 0:
        scores = SOFTCAP * (1.0 - 2.0 / (tl.exp(scores * (2.0 / SOFTCAP)) + 1.0))  # tanh
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def fold(
    scores: tl.tensor,
    value: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    result: tl.tensor,
    IN_HALVES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Fold a block of keys into the online softmax: highest score, sum of weights, and weighted sum of values.

    The state of a row that sees none of the keys does not change: its decay is 1 and its weights are 0.
    """
    peak = tl.maximum(highest, tl.max(scores, 1))
    against = tl.where(peak == float("-inf"), 0.0, peak)  # avoids -inf - (-inf) in rows without a score
    decay = tl.exp(highest - against)
    weights = tl.exp(scores - against[:, None])
    total = total * decay + tl.sum(weights, 1)
    result = result * decay[:, None]
    if IN_HALVES:  # a weight is split into a sum of two 16-bit numbers, with hardly any error
        high = weights.to(value.dtype)
        low = (weights - high.to(tl.float32)).to(value.dtype)
        result = tl.dot(low, value, tl.dot(high, value, result))
    else:
        result = tl.dot(weights, value.to(tl.float32), result, input_precision="ieee")
    return peak, total, result


@triton.jit
def nothing_seen(
    sinks: tl.tensor, is_head: tl.tensor, query: tl.tensor, HAS_SINKS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Initial state of the online softmax, sinks included: highest scores, sums of weights, weighted values."""
    result = tl.zeros(query.shape, tl.float32)
    total = tl.zeros((query.shape[0],), tl.float32)
    highest = tl.full((query.shape[0],), float("-inf"), tl.float32)
    if HAS_SINKS:
        highest, total = tl.load(sinks, mask=is_head, other=0.0), total + 1.0
    return highest, total, result


@triton.jit
def _meet(
    query: tl.tensor,
    own_query: tl.tensor,  # (QUERIES, KEY_DIM) to keys that have values as a second part
    keys: tl.tensor,
    values: tl.tensor,
    rows: tl.tensor,  # (BLOCK,) memory rows of the block's keys
    is_there: tl.tensor,  # (BLOCK,) whether the key exists
    is_seen: tl.tensor,  # (QUERIES, BLOCK)
    kv_head: tl.tensor,
    scale: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    result: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEY_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IN_HALVES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Load a block of keys and values, and fold it into the online softmax."""
    dims = tl.arange(0, query.shape[1])
    if KEY_DIM > 0:
        own_dims, places = tl.arange(0, own_query.shape[1]), rows[:, None] * HEAD_DIM + dims[None, :]
        is_own = is_there[:, None] & (own_dims < KEY_DIM)[None, :]
        key = tl.load(keys + rows[:, None] * KEY_DIM + own_dims[None, :], mask=is_own, other=0.0)
        value = tl.load(values + places, mask=is_there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        scores = (product(own_query, key, IN_HALVES) + product(query, value, IN_HALVES)) * scale
        scores = seen_scores(scores, is_seen, SOFTCAP)
    else:
        places = (rows[:, None] * NUM_KV_HEADS + kv_head) * HEAD_DIM + dims[None, :]
        is_number = is_there[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(keys + places, mask=is_number, other=0.0)
        scores = seen_scores(product(query, key, IN_HALVES) * scale, is_seen, SOFTCAP)
        value = tl.load(values + places, mask=is_number, other=0.0)
    highest, total, result = fold(scores, value, highest, total, result, IN_HALVES)
    return highest, total, result


@triton.jit
def _queries(
    queries: tl.tensor,
    heads: tl.tensor,  # (QUERIES, 1) of all rows
    is_query: tl.tensor,  # (QUERIES,)
    is_cell: tl.tensor,  # (QUERIES, DIM_PADDED)
    HEAD_DIM: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Queries to keys, or to values and to keys that have these as a second part."""
    dims = tl.arange(0, is_cell.shape[1])
    if KEY_DIM > 0:
        own_dims, begins = tl.arange(0, KEY_PADDED), queries + heads * (KEY_DIM + HEAD_DIM)
        is_own_cell = is_query[:, None] & (own_dims < KEY_DIM)[None, :]
        own_query = tl.load(begins + own_dims[None, :], mask=is_own_cell, other=0.0)
        query = tl.load(begins + KEY_DIM + dims[None, :], mask=is_cell, other=0.0)
    else:
        query = tl.load(queries + heads * HEAD_DIM + dims[None, :], mask=is_cell, other=0.0)
        own_query = query
    return query, own_query


@triton.jit
def _part_of_tile(tile: tl.tensor, ROWS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """This program's rows [begin, end); empty if the tile has fewer."""
    begin_row = tl.load(tile) + ROWS * tl.program_id(2)
    return begin_row, tl.minimum(tl.load(tile + 1), begin_row + ROWS)


@triton.jit
def _reach(
    lengths: tl.tensor, is_row: tl.tensor, window: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Ends and first positions of what rows see; the last of the ends, and the earliest of the firsts."""
    length = tl.load(lengths, mask=is_row, other=0)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    return length, first, tl.max(length, 0), tl.min(tl.where(is_row, first, 2147483647), 0)


@triton.jit
def _rows_of(
    tail: tl.tensor, positions: tl.tensor, base: tl.tensor, origin: tl.tensor, is_near: tl.tensor
) -> tl.tensor:
    """Memory rows (BLOCK,) int64 of the keys at these positions of one path."""
    in_tail = is_near & (positions >= base)
    tail_rows = tl.load(tail + (positions - base), mask=in_tail, other=0)
    return tl.where(in_tail, tail_rows, origin + positions).to(tl.int64)


@triton.jit
def _meet_own(
    begin_row: tl.tensor,
    end_row: tl.tensor,  # of the tile, or `begin_row` if no row has keys of its own
    row: tl.tensor,  # (QUERIES,)
    shared: tl.tensor,  # position of the first key
    path: tl.tuple,  # of `_attend`: lengths, tails, tail_width, base, origin, window
    asked: tl.tuple,  # query and own_query of `_meet`, keys and values
    kv_head: tl.tensor,
    scale: tl.tensor,
    state: tl.tuple,  # of the online softmax
    BLOCK: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEY_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IN_HALVES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Fold the keys on each row's own path into its online softmax, one row after another."""
    steps = tl.arange(0, BLOCK)
    lengths, tails, tail_width, base, origin, window = path
    query, own_query, keys, values = asked
    highest, total, result = state
    for own in range(begin_row, end_row):
        own_length, is_own = tl.load(lengths + own), row == own
        own_first = tl.where(window > 0, tl.maximum(own_length - window, 0), 0)
        for begin in tl.range(tl.maximum(shared, own_first // BLOCK * BLOCK), own_length, BLOCK, num_stages=1):
            is_near = (begin + steps >= own_first) & (begin + steps < own_length)
            rows = _rows_of(tails + own * tail_width, begin + steps, base, origin, is_near)
            is_seen = is_own[:, None] & is_near[None, :]
            block = (query, own_query, keys, values, rows, is_near, is_seen, kv_head, scale, highest, total, result)
            peak, weight, sums = _meet(*block, NUM_KV_HEADS, HEAD_DIM, KEY_DIM, SOFTCAP, IN_HALVES)
            highest, total = tl.where(is_own, peak, highest), tl.where(is_own, weight, total)
            result = tl.where(is_own[:, None], sums, result)  # other rows keep theirs even if this one's has NaN
    return highest, total, result


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING)
def _attend(
    queries: tl.tensor,  # (num_rows, num_heads, KEY_DIM + HEAD_DIM)
    keys: tl.tensor,  # (num_memory_rows, num_kv_heads, head_dim); (num_memory_rows, 1, KEY_DIM) with KEY_DIM
    values: tl.tensor,  # (num_memory_rows, num_kv_heads, head_dim); (num_memory_rows, 1, HEAD_DIM) with KEY_DIM
    origins: tl.tensor,  # this and the next four arguments are as in `Paths`
    bases: tl.tensor,
    lengths: tl.tensor,
    tails: tl.tensor,
    tiles: tl.tensor,
    sinks: tl.tensor,  # (num_heads,) float32; unused without HAS_SINKS
    out: tl.tensor,  # (num_rows, num_heads, HEAD_DIM)
    tail_width: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,  # 0 is unlimited
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0 is none
    HAS_SINKS: tl.constexpr,
    IN_HALVES: tl.constexpr,  # queries and keys have 16 bits, so their products are exact in float32
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a program
    GROUP_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    KEY_DIM: tl.constexpr,  # width of keys whose second part is the value; 0 if keys are apart from values
    KEY_PADDED: tl.constexpr,
) -> None:
    kv_head = tl.program_id(1)
    begin_row, end_row = _part_of_tile(tiles + 2 * tl.program_id(0), ROWS)
    lanes, dims, steps = tl.arange(0, ROWS * GROUP_PADDED), tl.arange(0, DIM_PADDED), tl.arange(0, BLOCK)
    row, head = begin_row + lanes // GROUP_PADDED, lanes % GROUP_PADDED
    is_row, is_any = row < end_row, begin_row < end_row  # the rows of a tile are of one slot
    is_query = is_row & (head < GROUP)
    is_cell = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    heads = ((row * NUM_KV_HEADS + kv_head) * GROUP + head)[:, None].to(tl.int64)
    cells = heads * HEAD_DIM + dims[None, :]
    query, part = _queries(queries, heads, is_query, is_cell, HEAD_DIM, KEY_DIM, KEY_PADDED)
    length, first, longest, earliest = _reach(lengths + row, is_row, window)
    origin = tl.load(origins + begin_row, mask=is_any, other=0).to(tl.int64)
    base = tl.load(bases + begin_row, mask=is_any, other=0)
    shared = tl.where(longest > base, base // BLOCK * BLOCK, longest)  # end of the blocks that all rows share
    highest, total, result = nothing_seen(sinks + kv_head * GROUP + head, head < GROUP, query, HAS_SINKS)
    for begin in range(earliest // BLOCK * BLOCK, shared, BLOCK):
        places = begin + steps
        is_seen = (places[None, :] >= first[:, None]) & (places[None, :] < length[:, None])
        is_there = (places >= earliest) & (places < longest)
        state = (query, part, keys, values, origin + places, is_there, is_seen, kv_head, scale, highest, total, result)
        highest, total, result = _meet(*state, NUM_KV_HEADS, HEAD_DIM, KEY_DIM, SOFTCAP, IN_HALVES)
    end_own, path = tl.where(longest > base, end_row, begin_row), (lengths, tails, tail_width, base, origin, window)
    own = (begin_row, end_own, row, shared, path, (query, part, keys, values), kv_head, scale)
    highest, total, result = _meet_own(
        *own, (highest, total, result), BLOCK, NUM_KV_HEADS, HEAD_DIM, KEY_DIM, SOFTCAP, IN_HALVES
    )
    tl.store(out + cells, (result / tl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty), mask=is_cell)


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
    """Attention of every row over its path; shapes as in `_attend`, any floating-point types."""
    _, num_heads, width = queries.shape
    _, num_kv_heads, head_dim = values.shape
    out, key_dim = queries.new_empty(len(queries), num_heads, head_dim), keys.shape[2] if width > head_dim else 0
    if key_dim:
        num_kv_heads = num_heads // heads_together(num_heads)
    in_halves = _in_halves(queries.dtype, keys.dtype)
    constants = tile_constants(num_heads // num_kv_heads, head_dim, in_halves, key_dim)
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


def _in_halves(query_dtype: torch.dtype, key_dtype: torch.dtype) -> bool:
    """Whether tensor cores may multiply in 16 bits; Triton's interpreter cannot multiply bfloat16."""
    is_interpreted = isinstance(_attend, InterpretedFunction)
    halves = (torch.float16,) if is_interpreted else (torch.float16, torch.bfloat16)
    return query_dtype == key_dtype and key_dtype in halves
