"""Tree attention on the CPU, in compiled code: each row's sums go key by key along its path.

Rows of a tree share the keys that are committed; the few others come after them, ancestors first, and what a row does
not see weighs exactly 0. So a row's sums are those of its path alone, in the order of its positions: the same bits in
any tree, beside any other rows.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from bough.model.cpu.attention_scores import KEYS_AHEAD, WIDTH, put_scores, rows_of, whole
from bough.model.cpu.attention_tiles import lanes_of, put_head, weigh_scores, weigh_values
from bough.model.cpu.gemm import GROUP
from bough.model.cpu.jit import strict, strict_inner, strict_parallel
from bough.model.cpu.kv_rows import layer_rows
from bough.model.cpu.llvm_vectors import LANES
from bough.model.cpu.work_stealing import as_thread, take, take_next, wait_for_all


@strict_inner
def _reach(spans: Any, row: Any, window: Any) -> Any:
    """The positions that a row sees, [first, end)."""
    end = np.int64(spans.lengths[row])
    return max(0, end - window) if window > 0 else 0, end


@strict_inner
def _tail_of(spans: Any, piece: Any, row: Any) -> Any:
    """Where in `spans.tails` a row's position 0 would be."""
    first_row, _, base, begin_tail, width, _ = spans.ranges[piece]
    return begin_tail + (row - first_row) * width - base


@strict_inner
def _gather(spans: Any, piece: Any, begin: Any, end: Any, start: Any, count: Any, kept: Any, place_of: Any) -> Any:
    """Slot rows beyond the base that some row of [begin, end) sees, onto the `count` that are kept; how many then.

    A node comes after its ancestors. `place_of` (slot rows,) takes where each one stands among the kept.
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


@strict_inner
def _hide(
    spans: Any,
    piece: Any,
    begin: Any,
    end: Any,
    window: Any,
    group: Any,
    start: Any,
    num_committed: Any,
    place_of: Any,
    scores: Any,
) -> Any:
    """-inf for whatever a row does not see, of num_committed keys from `start` on and all that follow them.

    scores (blocks, keys, lanes); the query heads of a row are neighbours.
    """
    _, num_keys, lanes = scores.shape
    base, hidden = spans.ranges[piece, 2], np.full((len(scores), num_keys - num_committed, lanes), -np.inf, np.float32)
    for row in range(begin, end):
        first, length = _reach(spans, row, window)
        tail = _tail_of(spans, piece, row)
        for i in range((row - begin) * group, (row - begin + 1) * group):
            block, lane = i // lanes, i % lanes
            for j in range(min(first - start, num_committed)):
                scores[block, j, lane] = -np.inf
            for j in range(length - start, num_committed):
                scores[block, j, lane] = -np.inf
            for position in range(max(base, first), length):
                hidden[block, place_of[spans.tails[tail + position]] - num_committed, lane] = 0
    for block in range(len(scores)):
        for j in range(num_keys - num_committed):
            for lane in range(lanes):
                scores[block, num_committed + j, lane] += hidden[block, j, lane]


@strict_inner
def _find_keys(spans: Any, piece: Any, begin: Any, end: Any, window: Any, place_of: Any) -> Any:
    """Slot rows of the keys that some of the rows [begin, end) see, and the last of them over and over beyond these.

    Returns them with where they start, how many of them are committed, one after another, and how many there are.
    """
    longest = shortest = np.int64(spans.lengths[begin])  # loops are compiled sooner than numpy's functions of arrays
    for row in range(begin + 1, end):
        longest, shortest = max(longest, np.int64(spans.lengths[row])), min(shortest, np.int64(spans.lengths[row]))
    start = max(0, shortest - window) if window > 0 else 0
    num_committed = max(0, min(spans.ranges[piece, 2], longest) - start)
    most = num_committed + spans.ranges[piece, 4] * (end - begin)
    kept = np.empty(whole(most, GROUP) + KEYS_AHEAD, np.int64)
    for j in range(num_committed):
        kept[j] = start + j
    num_kept = _gather(spans, piece, begin, end, start, num_committed, kept, place_of)
    for j in range(num_kept, len(kept)):
        kept[j] = kept[num_kept - 1]
    return kept, start, num_committed, num_kept


@strict_inner
def _in_whole_lines(numbers: Any, kept: Any, num_kept: Any) -> Any:
    """The rows that are kept, with zeros behind them, of numbers (rows, head_dim)."""
    copies = np.zeros((num_kept, whole(numbers.shape[1], WIDTH)), numbers.dtype)
    for j in range(num_kept):
        for d in range(numbers.shape[1]):
            copies[j, d] = numbers[kept[j], d]
    return copies


@strict_inner
def _attend_together(
    queries: Any,
    keys: Any,
    values: Any,
    spans: Any,
    task: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    sinks: Any,
    place_of: Any,
    out: Any,
) -> Any:
    """The query heads of one KV head, for some rows; `place_of` is -1 everywhere, and is left so."""
    piece, begin, end, kv_head = spans.tasks[task]
    _, num_kv_heads, head_dim = keys.shape
    group = len(sinks) // num_kv_heads
    kept, start, num_committed, num_kept = _find_keys(spans, piece, begin, end, window, place_of)
    num_keys, num_rows, width = whole(num_kept, GROUP), (end - begin) * group, whole(head_dim, WIDTH)
    asked = rows_of(queries, begin, end, kv_head, group, queries.shape[1] // len(sinks), width)
    lanes = lanes_of(num_rows)
    num_blocks = whole(num_rows, lanes) // lanes
    scores = np.empty((num_blocks, num_keys, lanes), np.float32)
    scores[num_blocks - 1, :, len(asked) - (num_blocks - 1) * lanes :] = 0
    heads = np.empty((num_blocks * lanes, width), np.float32)
    if width == head_dim:
        own_values, order = values[:, kv_head], kept
        put_scores(asked, keys[:, kv_head], kept, scores)
    else:  # nothing may be read beyond them
        order = np.empty(len(kept), np.int64)
        for j in range(len(order)):
            order[j] = min(j, num_kept - 1)
        put_scores(asked, _in_whole_lines(keys[:, kv_head], kept, num_kept), order, scores)
        own_values = _in_whole_lines(values[:, kv_head], kept, num_kept)
    _hide(spans, piece, begin, end, window, group, start, num_committed, place_of, scores)
    for j in range(num_committed, num_kept):
        place_of[kept[j]] = -1
    totals, own_sinks = np.empty((num_blocks, lanes), np.float32), np.empty(LANES, np.float32)
    for block in range(num_blocks):
        for place in range(LANES):
            i = block * lanes + place % lanes
            own_sinks[place] = sinks[kv_head * group + i % group] if i < num_rows else 0
        weigh_scores(scores[block], scale, softcap, own_sinks, totals[block])
    weigh_values(scores, own_values, order, num_committed, num_kept, num_rows, heads)
    for i in range(num_rows):
        total, place = totals[i // lanes, i % lanes], (kv_head * group + i % group) * head_dim
        put_head(heads[i, :head_dim], total, begin + i // group, place, out)


@strict
def share_attention(
    taken: Any,
    thread: Any,
    num_threads: Any,
    queries: Any,
    spans: Any,
    kind: Any,
    layer: Any,
    num_kv_heads: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    sinks: Any,
    out: Any,
) -> Any:
    """A thread's part of `attend`."""
    num_tasks, head_dim = len(spans.tasks), out.shape[1] // len(sinks)  # of rows, or of blocks
    most_keys = 0  # of a slot: its memory may be far more
    for piece in range(len(spans.ranges)):
        most_keys = max(most_keys, spans.ranges[piece, 5])
    place_of = np.full(most_keys, -1, np.int32)
    task = take(taken, thread, num_threads, num_tasks)
    while task < num_tasks:
        slot = spans.slots[spans.tasks[task, 0]]
        keys = layer_rows(slot[0], kind, layer, slot[2], num_kv_heads, head_dim)
        values = layer_rows(slot[1], kind, layer, slot[2], num_kv_heads, head_dim)
        _attend_together(queries, keys, values, spans, task, scale, window, softcap, sinks, place_of, out)
        task = take_next(taken, thread, num_threads, num_tasks)
    wait_for_all(taken, num_threads, num_tasks)


@strict_parallel
def attend(
    share: Any,
    taken: Any,
    num_threads: Any,
    queries: Any,
    spans: Any,
    kind: Any,
    layer: Any,
    num_kv_heads: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    sinks: Any,
    out: Any,
) -> Any:
    """Attention of all rows over their slots, a few rows and one KV head at a time.

    `share` is a pointer to `share_attention` (`bough.model.cpu.jit.pointer`).
    queries (rows, words of all heads) as words of the kind that slots hold: float32, or bfloat16 two to an int32.
    `kind` is a number of it. `out` is (rows, num_heads * head_dim) of that kind, bfloat16 as its bits; or (blocks,
    num_heads * head_dim, LANES) float32. Window 0 and softcap 0 are off; sinks (num_heads,) are scores that weigh
    nothing, -inf where there are none. Rows of no piece stay as they are. `taken` is a row of
    `bough.model.cpu.work_stealing.counters`.
    """
    for number in numba.prange(num_threads):
        thread = as_thread(number)
        share(taken, thread, num_threads, queries, spans, kind, layer, num_kv_heads, scale, window, softcap, sinks, out)


@strict
def store(spans: Any, kind: Any, layer: Any, keys: Any, values: Any) -> Any:
    """Puts new keys and values, (rows, num_kv_heads, head_dim) each, into the slot rows that take them."""
    _, num_kv_heads, head_dim = keys.shape
    for piece in range(len(spans.slots)):
        slot = spans.slots[piece]
        held_keys = layer_rows(slot[0], kind, layer, slot[2], num_kv_heads, head_dim)
        held_values = layer_rows(slot[1], kind, layer, slot[2], num_kv_heads, head_dim)
        for row in range(spans.ranges[piece, 0], spans.ranges[piece, 1]):
            stored = spans.rows[row]
            for head in range(num_kv_heads):
                for d in range(head_dim):
                    held_keys[stored, head, d] = keys[row, head, d]
                    held_values[stored, head, d] = values[row, head, d]
