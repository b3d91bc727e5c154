"""Tree attention on a CPU in one kernel, with the structure of the Triton kernel: tiles of rows, blocks of keys.

A tile is the query heads of one KV head for some rows of one slot; they are the SIMD lanes. It attends to the committed
keys, then to those on its rows' own paths, ancestors first; keys that a row does not see have weight exactly 0. A score
is one sum over a head's dimensions, a result one sum over keys in the order of their positions. So a row's result
depends only on its query and its path, bit for bit, in any tile or batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from bough.model.batch.batch import Chunk
from bough.model.batch.path_spans import PathSpans
from bough.model.cpu.float_bits import from_half, widened
from bough.model.cpu.jit import pointer, strict, strict_inner, strict_parallel
from bough.model.cpu.llvm_vectors import LANES
from bough.model.cpu.simd import add_products, all_lanes, exp_below_zero, larger, load, magnitude, where_positive
from bough.model.cpu.simd import store as put
from bough.model.cpu.work_stealing import as_thread, counters, shared

Floats = NDArray[np.float32]
_BEYOND_HALF = np.float32(65536)  # value of the exponent of infinities and NaN in float16
BLOCK = 16  # keys that are read and converted to float32 together, for all lanes of a tile
# Numbers of the types that the kernel reads: bfloat16 and float16 are passed as their bits.
KINDS: dict[torch.dtype, np.uint16 | np.int16 | np.float32] = {
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
    torch.float32: np.float32(0),
}
_shares: dict[torch.dtype, Any] = {}  # pointers to `share_attention`, by these types


def _typed_pointer(_context: Any, address: Any, kind: Any, index: Any) -> Any:
    """Pointer to entry `index` of an array of the type of `kind` at `address`."""
    signature = types.CPointer(kind)(address, kind, index)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))
        return builder.gep(first, [arguments[2]])

    return signature, codegen


_pointer: Any = intrinsic(_typed_pointer)


@strict_inner
def layer_rows(address: Any, kind: Any, layer: Any, num_rows: Any, num_kv_heads: Any, width: Any) -> Any:
    """A slot's keys or values of one layer, (num_rows, num_kv_heads, width), of the type of the number `kind`."""
    first = _pointer(address, kind, layer * num_rows * num_kv_heads * width)
    return carray(first, (num_rows, num_kv_heads, width))


class Rules(NamedTuple):
    """Parameters of attention other than queries, keys and values."""

    num_kv_heads: int
    scale: np.float32
    window: int  # positions that a row sees, its own included; 0 is unlimited
    softcap: np.float32  # 0 is none
    sinks: Floats  # (num_heads,) scores added to the softmax's denominator; -inf if there are none


class _Tile(NamedTuple):
    """The query heads of a KV head for some rows, and the keys that at least one of the rows sees."""

    begin: int  # first row
    end: int
    kv_head: int
    group: int  # query heads of a KV head
    start: int  # position of the first key
    num_committed: int  # keys that are contiguous in the slot
    behind: NDArray[np.int64]  # slot rows of the tree's keys
    sees: NDArray[np.bool_]  # (len(behind), rows) whether a row sees a key of the tree


def _as_float(number: Any) -> Any:
    """Convert a float32, or the bits of a bfloat16 (uint16) or a float16 (int16), to float32. For kernels only."""
    raise NotImplementedError


@overload(_as_float)
def _as_float_of(number):  # type: (Any) -> Any
    if isinstance(number, types.Float):
        return lambda number: number
    return (lambda number: _half(number)) if number.signed else (lambda number: widened(number))


@strict_inner
def _half(bits: Any) -> Any:
    """The float32 with these bits of a float16, which may be infinite or NaN."""
    number = from_half(np.uint16(bits))
    if abs(number) < _BEYOND_HALF:
        return number
    return number * np.float32(np.inf) if abs(number) == _BEYOND_HALF else np.float32(np.nan)


@strict_inner
def _reach(spans: Any, row: Any, window: Any) -> Any:
    """The positions that a row sees, [first, end)."""
    end = np.int64(spans.lengths[row])
    return max(0, end - window) if window > 0 else 0, end


@strict_inner
def _behind(spans: Any, piece: Any, begin: Any, end: Any, window: Any, start: Any) -> Any:
    """Slot rows beyond the base on the rows' paths, from position `start`, and which row sees which of them.

    All paths begin at the same position, so each row visits its keys in the order of their positions.
    """
    first_row, _, base, begin_tail, width, num_keys = spans.ranges[piece]
    num_rows, count = end - begin, 0
    kept, sees = np.empty(width * num_rows, np.int64), np.zeros((width * num_rows, num_rows), np.bool_)
    places = np.full(num_keys if width > 0 else 0, -1, np.int64)
    for row in range(begin, end):
        first, length = _reach(spans, row, window)
        tail = begin_tail + (row - first_row) * width - base
        for position in range(max(base, start), length):
            stored = spans.tails[tail + position]
            if places[stored] < 0:
                kept[count], places[stored] = stored, count
                count += 1
            sees[places[stored], row - begin] = position >= first
    return kept[:count], sees


@strict_inner
def _tile_of(spans: Any, task: Any, group: Any, window: Any) -> Any:
    piece, begin, end, kv_head = spans.tasks[task]
    start, last = _reach(spans, begin, window)
    for row in range(begin + 1, end):
        first, length = _reach(spans, row, window)
        start, last = min(start, first), max(last, length)
    num_committed = max(0, min(spans.ranges[piece, 2], last) - start)
    behind, sees = _behind(spans, piece, begin, end, window, start)
    return _Tile(begin, end, kv_head, group, start, num_committed, behind, sees)


@strict_inner
def _read(numbers: Any, tile: Any, begin: Any, end: Any, lines: Any) -> Any:
    """Copy a tile's keys or values [begin, end) from a slot's `numbers` (rows, num_kv_heads, head_dim) to `lines`."""
    for key in range(begin, end):
        row = tile.start + key if key < tile.num_committed else tile.behind[key - tile.num_committed]
        stored, line = numbers[row, tile.kv_head], lines[key - begin]
        for d in range(len(stored)):
            line[d] = _as_float(stored[d])


@strict_inner
def _lay_out(queries: Any, tile: Any, head_dim: Any, scale: Any, asked: Any) -> Any:
    """Copy a tile's queries, times `scale`, to `asked` (blocks, dimensions, LANES)."""
    for lane in range((tile.end - tile.begin) * tile.group):
        first = (tile.kv_head * tile.group + lane % tile.group) * head_dim
        query = queries[tile.begin + lane // tile.group, first : first + head_dim]
        here = asked[lane // LANES, :, lane % LANES]
        for d in range(len(query)):
            here[d] = _as_float(query[d]) * scale


@strict_inner
def _cap(scores: Any, softcap: Any) -> Any:
    """Replace scores by softcap * tanh(score / softcap)."""
    one, zero, limit = all_lanes(np.float32(1)), all_lanes(np.float32(0)), all_lanes(softcap)
    for block in range(len(scores)):
        for key in range(scores.shape[1]):
            score = load(scores[block], key)
            power = exp_below_zero(magnitude(score) * all_lanes(np.float32(-2) / softcap))
            size = limit * (one - power) / (one + power)
            put(scores[block], key, where_positive(score, size, zero - size))


@strict_inner
def _hide(spans: Any, tile: Any, window: Any, scores: Any) -> Any:
    """Set the scores (blocks, keys, LANES) of keys that a row does not see to -inf."""
    for lane in range((tile.end - tile.begin) * tile.group):
        row, here = lane // tile.group, scores[lane // LANES, :, lane % LANES]
        first, length = _reach(spans, tile.begin + row, window)
        for key in range(min(first - tile.start, tile.num_committed)):
            here[key] = -np.inf
        for key in range(length - tile.start, tile.num_committed):
            here[key] = -np.inf
        for key in range(tile.num_committed, len(here)):
            if not tile.sees[key - tile.num_committed, row]:
                here[key] = -np.inf


@strict_inner
def _weigh(scores: Any, totals: Any) -> Any:
    """Replace scores (keys, LANES) by weights; `totals` (LANES,), initially the sinks, becomes the sum of weights."""
    sinks = peak = load(totals, 0)
    for key in range(len(scores)):
        peak = larger(peak, load(scores, key))
    total = exp_below_zero(sinks - peak)
    for key in range(len(scores)):
        weight = exp_below_zero(load(scores, key) - peak)
        put(scores, key, weight)
        total = total + weight
    put(totals, 0, total)


@strict_inner
def _put_heads(heads: Any, totals: Any, tile: Any, head_dim: Any, out: Any) -> Any:
    """Write a tile's weighted sums of values, divided by the sums of weights, to `out`."""
    for lane in range((tile.end - tile.begin) * tile.group):
        row, first = tile.begin + lane // tile.group, (tile.kv_head * tile.group + lane % tile.group) * head_dim
        head, total = heads[lane // LANES, :, lane % LANES], totals[lane // LANES, lane % LANES]
        here = out[row // LANES, first : first + head_dim, row % LANES]
        for d in range(len(here)):
            here[d] = head[d] / total


@strict_inner
def _attend_tile(queries: Any, keys: Any, values: Any, spans: Any, tile: Any, rules: Any, out: Any) -> Any:
    head_dim, value_dim = queries.shape[1] // len(rules.sinks), values.shape[2]
    num_keys, num_own = tile.num_committed + len(tile.behind), keys.shape[2]
    width, num_blocks = -(-head_dim // LANES) * LANES, -(-(tile.end - tile.begin) * tile.group // LANES)
    lines, totals = np.zeros((BLOCK, width), np.float32), np.empty((num_blocks, LANES), np.float32)
    asked, heads = np.zeros((num_blocks, width, LANES), np.float32), np.zeros((num_blocks, width, LANES), np.float32)
    padded = np.zeros((num_blocks, -(-num_keys // BLOCK) * BLOCK, LANES), np.float32)
    scores = padded[:, :num_keys]
    _lay_out(queries, tile, head_dim, rules.scale, asked)
    for begin in range(0, num_keys, BLOCK):
        _read(keys, tile, begin, min(begin + BLOCK, num_keys), lines)
        if num_own < head_dim:
            _read(values, tile, begin, min(begin + BLOCK, num_keys), lines[:, num_own:])
        for block in range(num_blocks):
            add_products(lines, width, 1, width, asked[block], padded[block, begin : begin + BLOCK])
    if rules.softcap > 0:
        _cap(scores, rules.softcap)
    _hide(spans, tile, rules.window, scores)
    for block in range(num_blocks):
        for lane in range(LANES):
            totals[block, lane] = rules.sinks[tile.kv_head * tile.group + (block * LANES + lane) % tile.group]
        _weigh(scores[block], totals[block])
    for begin in range(0, num_keys, BLOCK):
        end = min(begin + BLOCK, num_keys)
        _read(values, tile, begin, end, lines)
        for block in range(num_blocks):
            add_products(lines, 1, width, end - begin, scores[block, begin:end], heads[block])
    _put_heads(heads, totals, tile, value_dim, out)


@strict_inner
def _rows_of(spans: Any, piece: Any, kind: Any, layer: Any, num_kv_heads: Any, key_dim: Any, value_dim: Any) -> Any:
    """Keys (rows, num_kv_heads, key_dim) and values (rows, num_kv_heads, value_dim) of a piece's slot in one layer."""
    slot = spans.slots[piece]
    keys = layer_rows(slot[0], kind, layer, slot[2], num_kv_heads, key_dim)
    return keys, layer_rows(slot[1], kind, layer, slot[2], num_kv_heads, value_dim)


@strict
def share_attention(
    taken: Any, thread: Any, num_threads: Any, queries: Any, spans: Any, kind: Any, layer: Any, rules: Any, out: Any
) -> Any:
    """A thread's share of `attend`."""
    num_tasks, num_heads = len(spans.tasks), len(rules.sinks)
    for task in shared(taken, thread, num_threads, num_tasks):
        tile = _tile_of(spans, task, num_heads // rules.num_kv_heads, rules.window)
        head_dim, value_dim = queries.shape[1] // num_heads, out.shape[1] // num_heads
        key_dim = head_dim if head_dim == value_dim else head_dim - value_dim
        keys, values = _rows_of(spans, spans.tasks[task, 0], kind, layer, rules.num_kv_heads, key_dim, value_dim)
        _attend_tile(queries, keys, values, spans, tile, rules, out)


@strict_parallel
def attend(
    share: Any, taken: Any, num_threads: Any, queries: Any, spans: Any, kind: Any, layer: Any, rules: Any, out: Any
) -> Any:
    """Attention of all rows over their slots, a tile at a time.

    `share` is a pointer to `share_attention` (`bough.model.cpu.jit.pointer`). `queries` (rows, num_heads * head_dim)
    have the type of the slots: float32, or 16 bits (`_as_float`); `kind` is a number of this type. `out` is (blocks,
    num_heads * value_dim, LANES) float32, its lanes are rows; rows that belong to no piece are left unchanged. Where
    queries are wider than values, a key's last value_dim numbers are its value, and are not stored twice. `taken` is a
    row of `bough.model.cpu.work_stealing.counters`.
    """
    for number in numba.prange(num_threads):
        share(taken, as_thread(number), num_threads, queries, spans, kind, layer, rules, out)


@strict
def store(spans: Any, kind: Any, layer: Any, keys: Any, values: Any) -> Any:
    """Write new keys and values, (rows, num_kv_heads, width) each, to their rows in the slots."""
    _, num_kv_heads, key_dim = keys.shape
    for piece in range(len(spans.slots)):
        held_keys, held_values = _rows_of(spans, piece, kind, layer, num_kv_heads, key_dim, values.shape[2])
        for row in range(spans.ranges[piece, 0], spans.ranges[piece, 1]):
            stored = spans.rows[row]
            for head in range(num_kv_heads):
                for d in range(key_dim):
                    held_keys[stored, head, d] = keys[row, head, d]
                for d in range(values.shape[2]):
                    held_values[stored, head, d] = values[row, head, d]


def attend_over(
    spans: PathSpans, layer: int, num_kv_heads: int, value_dim: int, queries: torch.Tensor, *rules: Any
) -> torch.Tensor:
    """Attention (num_rows, num_heads, value_dim) of queries (num_rows, num_heads, ...); 0 in rows of no piece."""
    num_rows, num_heads, _ = queries.shape
    flat, kind, num_threads = queries.reshape(num_rows, -1).contiguous(), KINDS[queries.dtype], numba.get_num_threads()
    out = torch.zeros(-(-num_rows // LANES), num_heads * value_dim, LANES)
    scale, window, softcap, sinks = rules
    own_sinks = np.full(num_heads, -np.inf, np.float32) if sinks is None else sinks.numpy()
    own_rules = Rules(num_kv_heads, np.float32(scale), window, np.float32(softcap), own_sinks)
    arguments = num_threads, _bits(flat).numpy(), spans, kind, layer, own_rules, out.numpy()
    taken = counters(num_threads)[0]
    if queries.dtype not in _shares:
        _shares[queries.dtype] = pointer(share_attention, taken, 0, *arguments)
    attend(_shares[queries.dtype], taken, *arguments)
    rows = out.transpose(1, 2).reshape(-1, out.shape[1])[:num_rows]
    return rows.to(queries.dtype).view(num_rows, num_heads, value_dim)


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    """A view with a numpy type that distinguishes the two kinds of 16 bits for the kernel."""
    views = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
    return numbers.view(views.get(numbers.dtype, numbers.dtype))


def attend_in_slots(
    chunk: Chunk, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rules: Any
) -> torch.Tensor:
    """Attention of all pieces of a chunk at once; `rules` are scale, window, softcap and sinks, which may be None.

    queries (num_rows, num_heads, head_dim), keys and values as in `store`. Where queries are wider than values, they
    are as wide as a key and a value, and the value is the key's second part.
    """
    kind = KINDS[keys.dtype]
    spans, number = chunk.spans(layer)
    store(spans, kind, number, *(_bits(numbers).numpy() for numbers in (keys, values)))
    return attend_over(spans, number, *values.shape[1:], queries, *rules)
