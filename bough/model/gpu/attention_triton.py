"""Tree attention on a GPU as a Triton kernel, the counterpart of `bough.model.cpu.attention_kernel`.

A program computes a tile of rows of one slot for one KV head, over a part of the positions. It reads the committed keys
once for all rows, and then for each row the keys on its own path. Each row visits its keys in the order of their
positions, in blocks fixed by position, and all products have the same shape; a block that a row does not see leaves its
state unchanged. Another kernel folds a row's parts in their order. So a row's result depends only on its query and its
path, bit for bit, in any tile; but in a draft's captured steps there are no parts. Keys and values are read from the
slot as stored; sums are in float32. In latent attention, keys contain their value as a second part: it is read once for
both, and the one KV head is computed as several, of some query heads each.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from bough.model.batch.path_spans import PART_KEYS, PARTIAL_BYTES, TILE_ROWS, Paths, num_parts, tile_bytes

# Arguments that vary between calls must not be specialised on: each specialisation is another program, which may round
# differently.
_VARYING = ("row_step", "head_step", "tail_width", "scale", "window", "part_keys", "num_places", "first_tile")
ANY_LENGTH = 2**31 - 1  # keys of a part if there is one, however long
BLOCK = 32  # keys in one step of the online softmax; 64 would exceed the registers
MIN_DOT = 16  # least rows and columns of a tensor core's tile
TILE_QUERIES = 64  # most rows times heads of a program: its results must stay in registers
NUM_STAGES = 2
FOLDED_HEADS = 4  # of a program that folds parts


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
        "TILE_ROWS": TILE_ROWS,
        "GROUP_PADDED": max(group_padded, MIN_DOT // rows),
        "DIM_PADDED": dim_padded,
        "KEY_DIM": key_dim,
        "KEY_PADDED": max(MIN_DOT, triton.next_power_of_2(key_dim)),
    }


def launch_options(constants: dict[str, int], in_halves: bool) -> dict[str, object]:
    """Compiler options, which depend only on the model, as `tile_constants` do.

    No family's kernel spills registers with so many warps (`python -m loadtest.gpu.compile_kernels`): large tiles spill
    with few warps, and heads of 256 with 8. With 8 warps the assembler uses more than 128 registers only if `maxnreg`
    allows it. Float32 uses one stage, as its tiles fill the shared memory of a small GPU.
    Fusing of products and sums is set, because its default differs between versions of Triton, and with it the bits.
    """
    tile = constants["ROWS"] * constants["GROUP_PADDED"] * constants["DIM_PADDED"]
    num_warps = 8 if in_halves and tile >= 4096 and constants["DIM_PADDED"] != 256 else 4
    stages, registers = NUM_STAGES if in_halves else 1, 240 if num_warps == 8 else None
    return {"num_warps": num_warps, "num_stages": stages, "maxnreg": registers, "enable_fp_fusion": True}


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
def _finished(
    highest: tl.tensor,
    total: tl.tensor,
    result: tl.tensor,
    sinks: tl.tensor,
    is_head: tl.tensor,
    HAS_SINKS: tl.constexpr,
) -> tl.tensor:
    """Results of a state over all of a row's keys. Sinks come last, so that they belong to none of the parts."""
    if HAS_SINKS:
        sink = tl.load(sinks, mask=is_head, other=0.0)
        peak = tl.maximum(highest, sink)
        decay = tl.exp(highest - peak)
        total, result = total * decay + tl.exp(sink - peak), result * decay[:, None]
    return result / tl.where(total == 0.0, 1.0, total)[:, None]


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
def _rows_of_tile(tiles: tl.tensor, tile: tl.tensor, at: tl.tensor, ROWS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """ROWS rows [begin, end) of a tile from its row `at` on; fewer or none if it ends before."""
    begin_row = tl.load(tiles + 2 * tile) + at
    return begin_row, tl.minimum(tl.load(tiles + 2 * tile + 1), begin_row + ROWS)


@triton.jit
def _seen(
    lengths: tl.tensor, is_row: tl.tensor, window: tl.tensor, begin: tl.tensor, end: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """First positions and ends of what rows see of the positions [begin, end)."""
    length = tl.load(lengths, mask=is_row, other=0)
    first = tl.where(window > 0, tl.maximum(length - window, begin), begin)
    return first, tl.minimum(length, end)


@triton.jit
def _rows_of(
    tail: tl.tensor, positions: tl.tensor, base: tl.tensor, origin: tl.tensor, is_near: tl.tensor
) -> tl.tensor:
    """Memory rows (BLOCK,) int64 of the keys at these positions of one path."""
    in_tail = is_near & (positions >= base)
    tail_rows = tl.load(tail + (positions - base), mask=in_tail, other=0)
    return tl.where(in_tail, tail_rows, origin + positions).to(tl.int64)


@triton.jit
def _state(
    tile: tl.tuple,  # rows [begin_row, end_row); each query's row, and first position and end of what it sees
    path: tl.tuple,  # of `_attend`: origins, bases, lengths, tails, tail_width, window; begin and end of the part
    asked: tl.tuple,  # query and own_query of `_meet`, keys, values, kv_head and scale
    BLOCK: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEY_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IN_HALVES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The online softmax over a part: over keys that all rows share, then each row's own, one row after another."""
    begin_row, end_row, row, first, length = tile
    origins, bases, lengths, tails, tail_width, window, begin_part, end_part = path
    query, own_query, keys, values, kv_head, scale = asked
    steps, result = tl.arange(0, BLOCK), tl.zeros(query.shape, tl.float32)
    total, highest = tl.zeros(row.shape, tl.float32), tl.full(row.shape, float("-inf"), tl.float32)
    longest = tl.max(tl.where(first < length, length, 0), 0)
    earliest = tl.min(tl.where(first < length, first, 2147483647), 0)
    origin, base = tl.load(origins + begin_row).to(tl.int64), tl.load(bases + begin_row)
    shared = tl.where(longest > base, base // BLOCK * BLOCK, longest)  # end of the blocks that all rows share
    for begin in range(earliest // BLOCK * BLOCK, shared, BLOCK):
        places = begin + steps
        is_seen = (places[None, :] >= first[:, None]) & (places[None, :] < length[:, None])
        is_there = (places >= earliest) & (places < longest)
        rows = origin + places
        block = (query, own_query, keys, values, rows, is_there, is_seen, kv_head, scale, highest, total, result)
        highest, total, result = _meet(*block, NUM_KV_HEADS, HEAD_DIM, KEY_DIM, SOFTCAP, IN_HALVES)
    for own in range(begin_row, tl.where(longest > base, end_row, begin_row)):
        own_first, own_length = _seen(lengths + own, own < end_row, window, begin_part, end_part)
        is_own = row == own
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
    tails: tl.tensor,
    lengths: tl.tensor,
    tiles: tl.tensor,
    sinks: tl.tensor,  # (num_heads,) float32; unused without HAS_SINKS
    out: tl.tensor,  # (num_rows, num_heads, HEAD_DIM), if there is one place
    results: tl.tensor,  # (held_rows, num_heads, num_places, HEAD_DIM) float32, if there are more; TILE_ROWS for a tile
    marks: tl.tensor,  # (held_rows, num_heads, num_places, 2) float32: highest score and total
    row_step: tl.tensor,  # from a query to the next row's, and to the next head's, in queries
    head_step: tl.tensor,
    tail_width: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,  # 0 is unlimited
    part_keys: tl.tensor,  # positions of a part, whole blocks
    num_places: tl.tensor,  # that a row's parts occupy in turn; a row sees no more of them
    first_tile: tl.tensor,  # of this launch
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0 is none
    HAS_SINKS: tl.constexpr,
    IN_HALVES: tl.constexpr,  # queries and keys have 16 bits, so their products are exact in float32
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a program
    TILE_ROWS: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    KEY_DIM: tl.constexpr,  # width of keys whose second part is the value; 0 if keys are apart from values
    KEY_PADDED: tl.constexpr,
) -> None:
    kv_head, part, cut = tl.program_id(1), tl.program_id(2) * ROWS // TILE_ROWS, tl.program_id(2) % (TILE_ROWS // ROWS)
    begin_row, end_row = _rows_of_tile(tiles, first_tile + tl.program_id(0), cut * ROWS, ROWS)
    lane, dims = tl.arange(0, ROWS * GROUP_PADDED), tl.arange(0, DIM_PADDED)
    row, head = begin_row + lane // GROUP_PADDED, lane % GROUP_PADDED
    begin, end = part * part_keys, (part + 1) * part_keys
    first, length = _seen(lengths + row, row < end_row, window, begin, end)
    if tl.max(length - first, 0) <= 0:  # no row sees a key of this part
        return
    is_query, own_head = (first < length) & (head < GROUP), kv_head * GROUP + head
    is_cell = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    heads = (row.to(tl.int64) * row_step + own_head * head_step)[:, None]
    query, own_query = _queries(queries, heads, is_query, is_cell, HEAD_DIM, KEY_DIM, KEY_PADDED)
    tile, asked = (begin_row, end_row, row, first, length), (query, own_query, keys, values, kv_head, scale)
    path = (origins, bases, lengths, tails, tail_width, window, begin, end)
    highest, total, result = _state(tile, path, asked, BLOCK, NUM_KV_HEADS, HEAD_DIM, KEY_DIM, SOFTCAP, IN_HALVES)
    if num_places == 1:
        mean = _finished(highest, total, result, sinks + own_head, is_query, HAS_SINKS).to(out.dtype.element_ty)
        places = row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + own_head
        tl.store(out + places[:, None] * HEAD_DIM + dims[None, :], mean, mask=is_cell)
    else:
        held_row = TILE_ROWS * tl.program_id(0) + ROWS * cut + lane // GROUP_PADDED
        places = (held_row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + own_head) * num_places + part % num_places
        tl.store(results + places[:, None] * HEAD_DIM + dims[None, :], result, mask=is_cell)
        tl.store(marks + 2 * places, highest, mask=is_query)
        tl.store(marks + 2 * places + 1, total, mask=is_query)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING)
def _fold_parts(
    lengths: tl.tensor,  # this and the other arguments are as in `_attend`
    tiles: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    results: tl.tensor,
    marks: tl.tensor,
    window: tl.tensor,
    part_keys: tl.tensor,
    num_places: tl.tensor,
    first_tile: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    DIM_PADDED: tl.constexpr,
) -> None:
    """Fold the parts of a row's keys in their order."""
    held_row, head, dims = tl.program_id(0), HEADS * tl.program_id(1) + tl.arange(0, HEADS), tl.arange(0, DIM_PADDED)
    row, end_row = _rows_of_tile(tiles, first_tile + held_row // TILE_ROWS, held_row % TILE_ROWS, 1)
    if row >= end_row:
        return
    is_head = head < NUM_HEADS
    is_cell = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    first, length = _seen(lengths + row, row < end_row, window, 0, 2147483647)
    highest, total = tl.full((HEADS,), float("-inf"), tl.float32), tl.zeros((HEADS,), tl.float32)
    result = tl.full((HEADS, DIM_PADDED), -0.0, tl.float32)  # so that one part keeps its bits, a -0.0 too
    for part in range(first // part_keys, (length - 1) // part_keys + 1):
        places = (held_row.to(tl.int64) * NUM_HEADS + head) * num_places + part % num_places
        sums = tl.load(results + places[:, None] * HEAD_DIM + dims[None, :], mask=is_cell, other=0.0)
        mark, weight = tl.load(marks + 2 * places, mask=is_head), tl.load(marks + 2 * places + 1, mask=is_head)
        peak = tl.maximum(highest, mark)
        against = tl.where(peak == float("-inf"), 0.0, peak)
        decay, share = tl.exp(highest - against), tl.exp(mark - against)
        highest, total = peak, total * decay + weight * share
        result = result * decay[:, None] + sums * share[:, None]
    mean = _finished(highest, total, result, sinks + head, is_head, HAS_SINKS).to(out.dtype.element_ty)
    places = row.to(tl.int64) * NUM_HEADS + head
    tl.store(out + places[:, None] * HEAD_DIM + dims[None, :], mean, mask=is_cell)


def attend_by_triton(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    paths: Paths,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    part_keys: int = PART_KEYS,
    most_bytes: int = PARTIAL_BYTES,
) -> torch.Tensor:
    """Attention of every row over its path; shapes as in `_attend`, any floating-point types.

    Tiles whose parts' results fit in `most_bytes`, but at least one, are computed at once.
    """
    num_rows, num_heads, width = queries.shape
    _, num_kv_heads, head_dim = values.shape
    if queries.stride(2) != 1 or any(step % width for step in queries.stride()[:2]):
        queries = queries.contiguous()
    steps = queries.stride(0) // width, queries.stride(1) // width
    out, key_dim = queries.new_empty(num_rows, num_heads, head_dim), keys.shape[2] if width > head_dim else 0
    if key_dim:
        num_kv_heads = num_heads // heads_together(num_heads)
    in_halves = _in_halves(queries.dtype, keys.dtype)
    constants = tile_constants(num_heads // num_kv_heads, head_dim, in_halves, key_dim)
    all_parts, num_places = num_parts(paths.longest, part_keys, window)
    num_tiles = together = len(paths.tiles)
    if num_places > 1:
        together = min(num_tiles, max(1, most_bytes // tile_bytes(num_heads, head_dim, num_places)))
    held_rows = together * TILE_ROWS if num_places > 1 else 0
    new = partial(torch.empty, dtype=torch.float32, device=queries.device)
    held = new(held_rows, num_heads, num_places, head_dim), new(held_rows, num_heads, num_places, 2)
    of_rows = paths.lengths, paths.tiles, queries if sinks is None else sinks, out, *held
    for first_tile in range(0, num_tiles, together):
        tiles = min(together, num_tiles - first_tile)
        parts = window, part_keys if paths.longest else ANY_LENGTH, num_places, first_tile
        _attend[(tiles, num_kv_heads, TILE_ROWS // constants["ROWS"] * all_parts)](
            *(queries, keys, values, paths.origins, paths.bases, paths.tails),
            *of_rows,
            *steps,
            paths.tails.shape[1],
            scale,
            *parts,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            SOFTCAP=float(softcap),
            HAS_SINKS=sinks is not None,
            IN_HALVES=in_halves,
            **constants,
            **launch_options(constants, in_halves),
        )
        if num_places > 1:
            sizes = num_heads, head_dim, sinks is not None, TILE_ROWS, FOLDED_HEADS, constants["DIM_PADDED"]
            grid = tiles * TILE_ROWS, triton.cdiv(num_heads, FOLDED_HEADS)
            num_warps = max(1, constants["DIM_PADDED"] // 128)  # one would spill with latents
            _fold_parts[grid](*of_rows, *parts, *sizes, num_warps=num_warps, enable_fp_fusion=True)
    return out


def _in_halves(query_dtype: torch.dtype, key_dtype: torch.dtype) -> bool:
    """Whether tensor cores may multiply in 16 bits; Triton's interpreter cannot multiply bfloat16."""
    is_interpreted = isinstance(_attend, InterpretedFunction)
    halves = (torch.float16,) if is_interpreted else (torch.float16, torch.bfloat16)
    return query_dtype == key_dtype and key_dtype in halves
