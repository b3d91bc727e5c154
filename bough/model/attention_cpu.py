"""Tree attention on the CPU: a kernel that walks each row's path block by block, all sessions of a chunk at once."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba.extending import overload

from bough.model.batch import Chunk, Piece
from bough.model.shares import counters, take
from bough.model.spans import Place, Spans, layer_rows

BLOCK = 64  # keys that share one step of the running softmax
# The types of numbers that the kernel reads; bfloat16 comes as its bits.
KINDS: dict[torch.dtype, np.uint16 | np.float32] = {torch.bfloat16: np.uint16(0), torch.float32: np.float32(0)}

# Sums may be vectorised; whatever order the compiler chose is the order for every row and every call.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


_compiled = numba.njit(fastmath=_FASTMATH, cache=True, error_model="numpy")
_parallel = numba.njit(fastmath=_FASTMATH, cache=True, error_model="numpy", parallel=True, nogil=True)


def _wide(stored: Any) -> Any:
    """A stored number as float32: bfloat16 comes as the uint16 of its bits. Only within kernels."""
    raise NotImplementedError


@overload(_wide, inline="always")
def _wide_in_kernels(stored):  # type: ignore[no-untyped-def]
    if isinstance(stored, numba.types.Integer):
        return lambda stored: np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)
    return lambda stored: stored


# Arrays are passed whole and indexed inside: a slice would hide from the compiler that its last axis is contiguous.


@_compiled
def _lay_out(keys, values, stored, kv_head, j, key_block, value_block):  # type: ignore[no-untyped-def]
    """A key and value at place j of a block, as float32: key_block (head_dim, BLOCK), value_block (BLOCK, head_dim)."""
    for d in range(key_block.shape[0]):
        key_block[d, j] = _wide(keys[stored, kv_head, d])
        value_block[j, d] = _wide(values[stored, kv_head, d])


@_compiled
def exp_below_zero(x):  # type: ignore[no-untyped-def]
    """e to the power of x <= 0, float32, good to a few units in the last place, 0 below -87.

    By hand, so that it is compiled into vector instructions: the library's would be called number by number.
    """
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    power = np.int32(np.int32(np.int32(max(n, np.float32(-126))) + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * power if x > np.float32(-87) else np.float32(0)


@_compiled
def _score(queries, row, head, key_block, begin, first, length, scale, softcap, scores):  # type: ignore[no-untyped-def]
    """Scores (BLOCK,) of one head with the keys of a block; -inf where a key is not to be seen."""
    head_dim = key_block.shape[0]
    for j in range(BLOCK):
        scores[j] = np.float32(0)
    for d in range(0, head_dim - 3, 4):  # four at a time: fewer trips of the sums to memory
        q0, q1 = queries[row, head, d], queries[row, head, d + 1]
        q2, q3 = queries[row, head, d + 2], queries[row, head, d + 3]
        for j in range(BLOCK):
            near = q0 * key_block[d, j] + q1 * key_block[d + 1, j]
            scores[j] += near + (q2 * key_block[d + 2, j] + q3 * key_block[d + 3, j])
    for d in range(head_dim // 4 * 4, head_dim):
        for j in range(BLOCK):
            scores[j] += queries[row, head, d] * key_block[d, j]
    for j in range(BLOCK):
        scores[j] *= scale
    if softcap > 0:
        for j in range(BLOCK):
            scores[j] = softcap * np.tanh(scores[j] / softcap)
    for j in range(max(0, first - begin)):
        scores[j] = -np.inf
    for j in range(min(BLOCK, length - begin), BLOCK):
        scores[j] = -np.inf


@_compiled
def _fold(scores, value_block, row, head, highest, total, out):  # type: ignore[no-untyped-def]
    """Folds a block into the running softmax of one head: highest score, sum of weights, weighted sum of values."""
    head_dim = out.shape[2]
    peak = highest[row, head]
    for j in range(BLOCK):
        peak = max(peak, scores[j])
    decay = exp_below_zero(highest[row, head] - peak)
    highest[row, head] = peak
    block_total = np.float32(0)
    for j in range(BLOCK):
        scores[j] = exp_below_zero(scores[j] - peak)
    for j in range(BLOCK):
        block_total += scores[j]
    total[row, head] = total[row, head] * decay + block_total
    for d in range(head_dim):
        out[row, head, d] *= decay
    for j in range(0, BLOCK, 4):
        w0, w1, w2, w3 = scores[j], scores[j + 1], scores[j + 2], scores[j + 3]
        for d in range(head_dim):
            near = w0 * value_block[j, d] + w1 * value_block[j + 1, d]
            out[row, head, d] += near + (w2 * value_block[j + 2, d] + w3 * value_block[j + 3, d])


@_compiled
def _store(spans, kind, layer, keys, values):  # type: ignore[no-untyped-def]
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


@_parallel
def _attend(taken, num_threads, queries, spans, kind, layer, num_kv_heads, scale, window, softcap, highest, total, out):  # type: ignore[no-untyped-def]
    """Running softmax over blocks of keys (arXiv 2205.14135), a few rows and one KV head at a time.

    queries, out (num_rows, num_heads, head_dim) float32; kind a float32, or a uint16 where bfloat16 is stored; window 0
    and softcap 0 are off; highest and total (num_rows, num_heads) begin with the attention's sinks. Keys that are
    unseen weigh exactly 0; rows of no piece stay as they are. `taken` counts the tasks that threads have taken.
    """
    _, num_heads, head_dim = queries.shape
    group, num_parts = num_heads // num_kv_heads, len(spans.parts)
    num_tasks = num_parts * num_kv_heads
    for thread in numba.prange(num_threads):
        scores = np.empty(BLOCK, np.float32)
        key_block, value_block = np.empty((head_dim, BLOCK), np.float32), np.empty((BLOCK, head_dim), np.float32)
        task = take(taken, thread, num_threads, num_tasks)
        while task < num_tasks:
            kv_head = task // num_parts
            piece, begin_row, end_row = spans.parts[task % num_parts]
            first_row, _, base, begin_tail, width, num_keys = spans.ranges[piece]
            slot = spans.slots[piece]
            keys = layer_rows(slot[0], kind, layer, slot[2], num_kv_heads, head_dim)
            values = layer_rows(slot[1], kind, layer, slot[2], num_kv_heads, head_dim)
            for begin in range(0, spans.lengths[begin_row:end_row].max(), BLOCK):
                # Keys that all rows share are laid out once, then each row's own on top; what is unseen must be finite.
                num_shared = max(0, min(begin + BLOCK, base, num_keys) - begin)
                for j in range(num_shared):
                    _lay_out(keys, values, begin + j, kv_head, j, key_block, value_block)
                key_block[:, num_shared:] = 0
                value_block[num_shared:] = 0
                for row in range(begin_row, end_row):
                    length = spans.lengths[row]
                    first = max(0, length - window) if window > 0 else 0
                    if begin >= length or begin + BLOCK <= first:
                        continue
                    tail = begin_tail + (row - first_row) * width + begin - base
                    for j in range(num_shared, min(BLOCK, length - begin)):
                        _lay_out(keys, values, spans.tails[tail + j], kv_head, j, key_block, value_block)
                    for head in range(kv_head * group, (kv_head + 1) * group):
                        _score(queries, row, head, key_block, begin, first, length, scale, softcap, scores)
                        _fold(scores, value_block, row, head, highest, total, out)
            for row in range(begin_row, end_row):
                for head in range(kv_head * group, (kv_head + 1) * group):
                    for d in range(head_dim):
                        out[row, head, d] /= total[row, head]
            task = take(taken, thread, num_threads, num_tasks)


def _attend_over(
    spans: Spans,
    kind: np.uint16 | np.float32,
    layer: int,
    num_kv_heads: int,
    queries: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """queries (num_rows, num_heads, head_dim) of any type, out in float32, 0 in rows of no piece; `kind` as above."""
    queries = queries.float().contiguous()
    num_rows, num_heads, _ = queries.shape
    highest = np.full((num_rows, num_heads), -np.inf, np.float32)
    total = np.zeros((num_rows, num_heads), np.float32)
    if sinks is not None:
        highest[:], total[:] = sinks.numpy(), 1.0
    out = torch.zeros_like(queries)
    numbers = np.float32(scale), window, np.float32(softcap)
    num_threads = numba.get_num_threads()
    _attend(
        counters(num_threads)[0],
        num_threads,
        queries.numpy(),
        spans,
        kind,
        layer,
        num_kv_heads,
        *numbers,
        highest,
        total,
        out.numpy(),
    )
    return out


def attend_on_cpu(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    piece: Piece,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one piece's rows, float32 out.

    queries (num_rows, num_heads, head_dim), keys and values (num_keys, num_kv_heads, head_dim), of any floating types.
    """
    stored_keys, stored_values = ((t if t.dtype in KINDS else t.float()).contiguous() for t in (keys, values))
    place = Place(stored_keys.data_ptr(), stored_values.data_ptr(), len(keys))
    spans = Spans.at([place], [piece])
    return _attend_over(spans, KINDS[stored_keys.dtype], 0, keys.shape[1], queries, scale, window, softcap, sinks)


def attend_in_slots(
    chunk: Chunk,
    layer: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *rules: Any,
) -> torch.Tensor:
    """All pieces of a chunk at once on the CPU, where slots hold what the kernel reads; shapes as in `_store`."""
    kind = KINDS[keys.dtype]
    bits = [numbers.view(torch.uint16) if kind.nbytes == 2 else numbers for numbers in (keys, values)]
    _store(chunk.spans, kind, layer, *(numbers.numpy() for numbers in bits))
    return _attend_over(chunk.spans, kind, layer, keys.shape[1], queries, *rules)
