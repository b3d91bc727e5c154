"""Attention of a draft's rows over their sessions' slots: products of 16-bit numbers throughout.

Leaner than `bough.model.attention_cpu`, and not the same bits whatever else is in the batch: a draft need not be.
"""

from __future__ import annotations

import numba
import numpy as np

from bough.model.attention_cpu import exp_below_zero
from bough.model.packed import rounded
from bough.model.products import MAX_ROWS, WIDTH, compiled, multiply_groups, parallel
from bough.model.spans import layer_rows
from bough.model.vectors import LANES

LEAST = np.float32(-80)  # e to it counts for nothing; e to less is a number that processors are slow with
_SINGLE, _PAIR = np.uint16(0), np.uint32(0)  # how the bits of bfloat16 are read


@compiled
def _choose_keys(spans, piece, begin, end, window, chosen, place_of):  # type: ignore[no-untyped-def]
    """Slot rows that some row of [begin, end) may see, into `chosen`; how many, and how many are committed.

    `place_of` (slot rows,) takes where each one of a tail stands among them.
    """
    base = spans.ranges[piece, 2]
    longest, shortest = np.int64(spans.lengths[begin:end].max()), np.int64(spans.lengths[begin:end].min())
    start = max(0, shortest - window) if window > 0 else 0
    num_committed = max(0, min(base, longest) - start)
    for j in range(num_committed):
        chosen[j] = start + j
    count = num_committed
    for row in range(begin, end):
        tail = spans.ranges[piece, 3] + (row - spans.ranges[piece, 0]) * spans.ranges[piece, 4] - base
        for position in range(max(base, start), spans.lengths[row]):
            stored = spans.tails[tail + position]
            if place_of[stored] < 0:
                place_of[stored] = count
                chosen[count] = stored
                count += 1
    return start, num_committed, count


@compiled
def _lay_out_keys(keys, chosen, kv_head, out):  # type: ignore[no-untyped-def]
    """out (keys / LANES, head_dim / 2, LANES) pairs: the keys as a matrix of `multiply`, zeros where they end."""
    for block in range(out.shape[0]):
        some, here = chosen[block * LANES : (block + 1) * LANES], out[block]
        if len(some) == LANES:
            for pair in range(here.shape[0]):
                for lane in range(LANES):
                    here[pair, lane] = keys[some[lane], kv_head, pair]
            continue
        here[:] = 0
        for lane in range(len(some)):
            for pair in range(here.shape[0]):
                here[pair, lane] = keys[some[lane], kv_head, pair]


@compiled
def _lay_out_values(values, chosen, kv_head, out):  # type: ignore[no-untyped-def]
    """out (head_dim / LANES, keys / 2, LANES) pairs of keys: the values as a matrix of `multiply`, padded with 0."""
    head_dim, count = values.shape[2], len(chosen)
    if head_dim % WIDTH:
        out[-1] = 0
    for both in range(out.shape[1]):
        if 2 * both + 1 < count:
            _pair_up(values[chosen[2 * both], kv_head], values[chosen[2 * both + 1], kv_head], out, both)
        elif 2 * both < count:
            only = values[chosen[2 * both], kv_head]
            _pair_up(only, np.zeros_like(only), out, both)
        else:
            out[:, both] = 0


@compiled
def _pair_up(first, second, out, both):  # type: ignore[no-untyped-def]
    for block in range((len(first) + LANES - 1) // LANES):
        low, high = first[block * LANES : (block + 1) * LANES], second[block * LANES : (block + 1) * LANES]
        here = out[block, both]
        for lane in range(len(low)):
            here[lane] = np.uint32(low[lane]) | np.uint32(high[lane]) << np.uint32(16)


@compiled
def _highest(scores):  # type: ignore[no-untyped-def]
    """The highest score, in sixteen runs side by side: a single one would wait for itself at each step."""
    peaks = np.full(LANES, -np.inf, np.float32)
    num_whole = len(scores) // LANES
    for run in range(num_whole):
        some = scores[run * LANES : (run + 1) * LANES]
        for lane in range(LANES):
            peaks[lane] = max(peaks[lane], some[lane])
    peak = peaks.max()
    for score in scores[num_whole * LANES :]:
        peak = max(peak, score)
    return peak


# Loops count from 0 over slices: of a count from elsewhere the compiler cannot know that no index is negative, which
# would mean one from the end, and it makes no vector instructions of such a loop.


@compiled
def _weigh(scores, scale, low, high, places, weights):  # type: ignore[no-untyped-def]
    """Softmax over places [low, high) and `places`, as bfloat16's bits into zeroed `weights`; the sum is returned."""
    committed, out = scores[low:high], weights[low:high]
    peak = _highest(committed)
    for j in places:
        peak = max(peak, scores[j])
    total = np.float32(0)
    for j in range(len(committed)):
        committed[j] = exp_below_zero(max((committed[j] - peak) * scale, LEAST))
    for j in range(len(committed)):
        total += committed[j]
    for j in range(len(committed)):
        out[j] = rounded(committed[j])
    for j in places:
        weight = exp_below_zero(max((scores[j] - peak) * scale, LEAST))
        total += weight
        weights[j] = rounded(weight)
    return total


@compiled
def _whole(number, step):  # type: ignore[no-untyped-def]
    return (number + step - 1) // step * step


@compiled
def _attend_part(queries, keys, values, spans, part, kv_head, group, scale, window, out):  # type: ignore[no-untyped-def]
    """The query heads of one KV head, for rows that attend together."""
    piece, begin, end = spans.parts[part]
    head_dim, base = values.shape[2], spans.ranges[piece, 2]
    place_of = np.full(len(keys), -1, np.int32)
    chosen = np.empty(base + spans.ranges[piece, 4] * (end - begin), np.int64)
    start, num_committed, count = _choose_keys(spans, piece, begin, end, window, chosen, place_of)
    num_keys, num_rows = _whole(count, WIDTH), (end - begin) * group
    asked = np.zeros((_whole(num_rows, MAX_ROWS), head_dim), np.uint16)
    for i in range(num_rows):
        column = (kv_head * group + i % group) * head_dim
        query, here = queries[begin + i // group, column : column + head_dim], asked[i]
        for d in range(len(here)):
            here[d] = query[d]
    matrix = np.empty((num_keys // LANES, head_dim // 2, LANES), np.uint32)
    _lay_out_keys(keys, chosen[:count], kv_head, matrix)
    scores = np.zeros((len(asked), num_keys), np.float32)
    multiply_groups(asked, num_rows, matrix, 0, head_dim // 2, scores, 0, num_keys // WIDTH, WIDTH, LANES)
    places = np.empty(spans.ranges[piece, 4], np.int32)
    weights, totals = np.zeros((len(asked), num_keys), np.uint16), np.empty(num_rows, np.float32)
    for i in range(num_rows):
        row = begin + i // group
        length = np.int64(spans.lengths[row])
        first = max(0, length - window) if window > 0 else 0
        tail = spans.ranges[piece, 3] + (row - spans.ranges[piece, 0]) * spans.ranges[piece, 4] - base
        num_places = 0
        for position in range(max(base, first), length):
            places[num_places] = place_of[spans.tails[tail + position]]
            num_places += 1
        low, high = first - start, min(num_committed, length - start)
        totals[i] = _weigh(scores[i], scale, low, high, places[:num_places], weights[i])
    matrix = np.empty((_whole(head_dim, WIDTH) // LANES, num_keys // 2, LANES), np.uint32)
    _lay_out_values(values, chosen[:count], kv_head, matrix)
    heads = np.zeros((len(asked), _whole(head_dim, WIDTH)), np.float32)
    multiply_groups(weights, num_rows, matrix, 0, num_keys // 2, heads, 0, heads.shape[1] // WIDTH, WIDTH, LANES)
    for i in range(num_rows):
        column = (kv_head * group + i % group) * head_dim
        head, here, share = heads[i], out[begin + i // group, column : column + head_dim], np.float32(1) / totals[i]
        for d in range(len(here)):
            here[d] = rounded(head[d] * share)


@parallel
def attend(queries, spans, layer, num_heads, num_kv_heads, scale, window, out):  # type: ignore[no-untyped-def]
    """queries, out (rows, num_heads * head_dim) as the bits of bfloat16; window 0 is off."""
    head_dim = queries.shape[1] // num_heads
    for task in numba.prange(len(spans.parts) * num_kv_heads):
        part, kv_head = task // num_kv_heads, task % num_kv_heads
        slot = spans.slots[spans.parts[part, 0]]
        keys = layer_rows(slot[0], _PAIR, layer, slot[2], num_kv_heads, head_dim // 2)
        values = layer_rows(slot[1], _SINGLE, layer, slot[2], num_kv_heads, head_dim)
        group = num_heads // num_kv_heads
        _attend_part(queries, keys, values, spans, part, kv_head, group, scale, window, out)
