"""Attention of a draft's rows over their sessions' slots: products of 16-bit numbers throughout, rows as lanes.

Leaner than `bough.model.attention_cpu`, and not the same bits whatever else is in the batch: a draft need not be.
Keys and values that all rows share are read where they stand; the few others are copied together.
"""

from __future__ import annotations

import numba
import numpy as np

from bough.model.attention_cpu import exp_below_zero
from bough.model.packed import rounded
from bough.model.spans import layer_rows
from bough.model.tiles import GROUP, multiply_groups
from bough.model.value_tiles import WIDTH, weigh_values
from bough.model.vectors import LANES

FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
compiled = numba.njit(fastmath=FASTMATH, cache=True, error_model="numpy")
parallel = numba.njit(fastmath=FASTMATH, cache=True, error_model="numpy", parallel=True)

LEAST = np.float32(-80)  # e to it counts for nothing; e to less is a number that processors are slow with
_BITS = np.uint16(0)  # how bfloat16 is read


@compiled
def _reach(spans, row, window):  # type: ignore[no-untyped-def]
    """The positions that a row sees, [first, end)."""
    end = np.int64(spans.lengths[row])
    return max(0, end - window) if window > 0 else 0, end


@compiled
def _tail_of(spans, piece, row):  # type: ignore[no-untyped-def]
    """Where in `spans.tails` a row's position 0 would be."""
    first_row, _, base, begin_tail, width, _ = spans.ranges[piece]
    return begin_tail + (row - first_row) * width - base


@compiled
def _gather(spans, piece, begin, end, start, count, kept, place_of):  # type: ignore[no-untyped-def]
    """Slot rows beyond the base that some row of [begin, end) sees, onto the `count` that are kept; how many then.

    `place_of` (slot rows,) takes where each one stands among them.
    """
    base = spans.ranges[piece, 2]
    for row in range(begin, end):
        tail = _tail_of(spans, piece, row)
        for position in range(max(base, start), spans.lengths[row]):
            stored = spans.tails[tail + position]
            if place_of[stored] < 0:
                place_of[stored] = count
                kept[count] = stored
                count += 1
    return count


@compiled
def _hide(spans, piece, begin, end, window, group, start, num_shared, base, place_of, num_copied, scores):  # type: ignore[no-untyped-def]
    """-inf for whatever a row does not see, of num_shared keys from `start` on and num_copied after them.

    scores (blocks, keys, LANES); the query heads of a row are neighbours.
    """
    hidden = np.empty(num_copied, np.float32)
    for row in range(begin, end):
        first, length = _reach(spans, row, window)
        hidden[:] = -np.inf
        for position in range(max(first, start + num_shared), min(base, length)):
            hidden[position - start - num_shared] = 0
        tail = _tail_of(spans, piece, row)
        for position in range(max(base, first), length):
            hidden[place_of[spans.tails[tail + position]]] = 0
        for i in range((row - begin) * group, (row - begin + 1) * group):
            block, lane = i // LANES, i % LANES
            for j in range(max(0, first - start)):
                scores[block, j, lane] = -np.inf
            for j in range(max(0, length - start), num_shared):
                scores[block, j, lane] = -np.inf
            for j in range(num_copied):
                scores[block, num_shared + j, lane] += hidden[j]


@compiled
def _softmax(scores, scale, weights):  # type: ignore[no-untyped-def]
    """Of a block's scores (keys, LANES), not yet divided by the sums (LANES,), which are returned.

    weights (pairs of keys, LANES) takes two bfloat16 each.
    """
    peaks, totals = np.full(LANES, -np.inf, np.float32), np.zeros(LANES, np.float32)
    for j in range(len(scores)):
        for lane in range(LANES):
            peaks[lane] = max(peaks[lane], scores[j, lane])
    for pair in range(len(weights)):
        for lane in range(LANES):
            low = exp_below_zero(max((scores[2 * pair, lane] - peaks[lane]) * scale, LEAST))
            high = exp_below_zero(max((scores[2 * pair + 1, lane] - peaks[lane]) * scale, LEAST))
            totals[lane] += low + high
            weights[pair, lane] = np.uint32(rounded(low)) | np.uint32(rounded(high)) << np.uint32(16)
    return totals


@compiled
def _whole(number, step):  # type: ignore[no-untyped-def]
    return (number + step - 1) // step * step


@compiled
def _attend_part(queries, keys, values, spans, part, kv_head, group, scale, window, out):  # type: ignore[no-untyped-def]
    """The query heads of one KV head, for rows that attend together; queries as words of two numbers."""
    piece, begin, end = spans.parts[part]
    head_dim, base = values.shape[2], spans.ranges[piece, 2]
    longest, shortest = np.int64(spans.lengths[begin:end].max()), np.int64(spans.lengths[begin:end].min())
    start = max(0, shortest - window) if window > 0 else 0
    num_committed = max(0, min(base, longest) - start)
    num_shared = num_committed // GROUP * GROUP if head_dim % WIDTH == 0 else 0
    place_of = np.full(len(keys), -1, np.int32)
    kept = np.empty(num_committed - num_shared + spans.ranges[piece, 4] * (end - begin), np.int64)
    num_kept = num_committed - num_shared
    for j in range(num_kept):
        kept[j] = start + num_shared + j
        place_of[kept[j]] = j
    num_kept = _gather(spans, piece, begin, end, start, num_kept, kept, place_of)
    num_copied, num_rows, num_words = _whole(num_kept, GROUP), (end - begin) * group, head_dim // 2
    copied = np.zeros((2, num_copied, _whole(head_dim, WIDTH)), np.uint16)
    for j in range(num_kept):
        copied[0, j, :head_dim], copied[1, j, :head_dim] = keys[kept[j], kv_head], values[kept[j], kv_head]
    num_blocks, num_keys = _whole(num_rows, LANES) // LANES, num_shared + num_copied
    asked = np.zeros((num_blocks, num_words, LANES), np.int32)
    for i in range(num_rows):
        words = queries[begin + i // group, (kv_head * group + i % group) * num_words :]
        for word in range(num_words):
            asked[i // LANES, word, i % LANES] = words[word]
    scores = np.zeros((num_blocks, num_keys, LANES), np.float32)
    multiply_groups(asked, keys[start : start + num_shared, kv_head], 0, num_shared // GROUP, None, scores)
    multiply_groups(asked, copied[0], 0, num_copied // GROUP, None, scores[:, num_shared:])
    _hide(spans, piece, begin, end, window, group, start, num_shared, base, place_of, num_copied, scores)
    weights, totals = np.empty((num_blocks, num_keys // 2, LANES), np.uint32), np.empty(num_blocks * LANES, np.float32)
    for block in range(num_blocks):
        totals[block * LANES : (block + 1) * LANES] = _softmax(scores[block], scale, weights[block])
    heads = np.zeros((num_blocks * LANES, copied.shape[2]), np.float32)
    weigh_values(weights, 0, values[start : start + num_shared, kv_head], num_rows, heads)
    weigh_values(weights, num_shared // 2, copied[1], num_rows, heads)
    for i in range(num_rows):
        column = (kv_head * group + i % group) * head_dim
        head, here, share = (
            heads[i, :head_dim],
            out[begin + i // group, column : column + head_dim],
            np.float32(1) / totals[i],
        )
        for d in range(len(here)):
            here[d] = rounded(head[d] * share)


@parallel
def attend(queries, spans, layer, num_heads, num_kv_heads, scale, window, out):  # type: ignore[no-untyped-def]
    """out (rows, num_heads * head_dim) as the bits of bfloat16, queries as words of two; window 0 is off."""
    head_dim = out.shape[1] // num_heads
    for task in numba.prange(len(spans.parts) * num_kv_heads):
        part, kv_head = task // num_kv_heads, task % num_kv_heads
        slot = spans.slots[spans.parts[part, 0]]
        keys = layer_rows(slot[0], _BITS, layer, slot[2], num_kv_heads, head_dim)
        values = layer_rows(slot[1], _BITS, layer, slot[2], num_kv_heads, head_dim)
        group = num_heads // num_kv_heads
        _attend_part(queries, keys, values, spans, part, kv_head, group, scale, window, out)
