"""Tree attention on a GPU: what `bough.model.cpu.attention_cpu` does on a CPU, as a Triton kernel.

One program for each row and KV head walks the keys of its own path in the order of their positions, in blocks fixed by
position. It reads keys and values from the slot as they are stored and sums in float32. No program sees another's row,
so a row's result depends on its query and its path alone, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from bough.model.batch.gpu_paths import Paths

BLOCK = 64  # keys that share one step of the running softmax
MIN_DOT = 16  # rows and columns that a tile of a GPU's matrix units has at least
NUM_WARPS, NUM_STAGES = 4, 3

# What changes from call to call must not be specialised on: each special case is a program of its own, with a rounding
# of its own.
_VARYING = ("tail_width", "window", "scale")


@triton.jit
def _scores(query, key, is_seen, scale, SOFTCAP: tl.constexpr, IN_HALVES: tl.constexpr):  # type: ignore[no-untyped-def]
    """(GROUP_PADDED, BLOCK) float32; -inf where a key is not to be seen."""
    if IN_HALVES:
        scores = tl.dot(query, tl.trans(key)) * scale
    else:
        scores = tl.dot(query.to(tl.float32), tl.trans(key.to(tl.float32)), input_precision="ieee") * scale
    if SOFTCAP > 0:
        scores = SOFTCAP * (1.0 - 2.0 / (tl.exp(scores * (2.0 / SOFTCAP)) + 1.0))  # tanh
    return tl.where(is_seen[None, :], scores, float("-inf"))


@triton.jit
def _fold(scores, value, highest, total, result, IN_HALVES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Folds a block into the running softmax: its highest score, the sum of weights, and the weighted values."""
    peak = tl.maximum(highest, tl.max(scores, 1))
    decay = tl.exp(highest - peak)
    weights = tl.exp(scores - peak[:, None])
    total = total * decay + tl.sum(weights, 1)
    result = result * decay[:, None]
    if IN_HALVES:  # a weight is the sum of two 16-bit numbers, as good as exactly
        high = weights.to(value.dtype)
        low = (weights - high.to(tl.float32)).to(value.dtype)
        result = tl.dot(low, value, tl.dot(high, value, result))
    else:
        result = tl.dot(weights, value.to(tl.float32), result, input_precision="ieee")
    return peak, total, result


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING)
def _attend(  # type: ignore[no-untyped-def]
    queries,  # (num_rows, num_heads, head_dim)
    keys,  # (num_memory_rows, num_kv_heads, head_dim)
    values,  # likewise
    origins,  # these four as in `Paths`
    bases,
    lengths,
    tails,
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
    GROUP_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    row, kv_head = tl.program_id(0), tl.program_id(1)
    heads, dims, steps = tl.arange(0, GROUP_PADDED), tl.arange(0, DIM_PADDED), tl.arange(0, BLOCK)
    is_head, is_dim = heads < GROUP, dims < HEAD_DIM
    cells = ((row * NUM_KV_HEADS + kv_head) * GROUP + heads[:, None]).to(tl.int64) * HEAD_DIM + dims[None, :]
    is_cell = is_head[:, None] & is_dim[None, :]
    query = tl.load(queries + cells, mask=is_cell, other=0.0)
    origin, base, length = tl.load(origins + row), tl.load(bases + row), tl.load(lengths + row)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    highest = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PADDED,), tl.float32)
    if HAS_SINKS:
        highest = tl.load(sinks + kv_head * GROUP + heads, mask=is_head, other=0.0)
        total = tl.full((GROUP_PADDED,), 1.0, tl.float32)
    result = tl.zeros((GROUP_PADDED, DIM_PADDED), tl.float32)
    for begin in range(first // BLOCK * BLOCK, length, BLOCK):
        positions = begin + steps
        is_seen = (positions >= first) & (positions < length)
        in_tail = is_seen & (positions >= base)
        tail_rows = tl.load(tails + row.to(tl.int64) * tail_width + (positions - base), mask=in_tail, other=0)
        rows = tl.where(in_tail, tail_rows, origin + positions).to(tl.int64)
        places = (rows[:, None] * NUM_KV_HEADS + kv_head) * HEAD_DIM + dims[None, :]
        is_there = is_seen[:, None] & is_dim[None, :]
        key = tl.load(keys + places, mask=is_there, other=0.0)
        scores = _scores(query, key, is_seen, scale, SOFTCAP, IN_HALVES)
        value = tl.load(values + places, mask=is_there, other=0.0)
        highest, total, result = _fold(scores, value, highest, total, result, IN_HALVES)
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
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    in_halves = _in_halves(queries.dtype, keys.dtype)
    _attend[(num_rows, num_kv_heads)](
        queries,
        keys,
        values,
        paths.origins,
        paths.bases,
        paths.lengths,
        paths.tails,
        queries if sinks is None else sinks,
        out,
        paths.tails.shape[1],
        scale,
        window,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        SOFTCAP=float(softcap),
        HAS_SINKS=sinks is not None,
        IN_HALVES=in_halves,
        BLOCK=BLOCK,
        GROUP_PADDED=max(MIN_DOT, triton.next_power_of_2(group)),
        DIM_PADDED=max(MIN_DOT, triton.next_power_of_2(head_dim)),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES if in_halves else 1,  # float32 tiles fill the shared memory of a small GPU as it is
        enable_fp_fusion=True,  # versions of Triton differ in their default, and so would the bits
    )
    return out


def _in_halves(query_dtype: torch.dtype, key_dtype: torch.dtype) -> bool:
    """Whether matrix units may take the numbers as they are; Triton's interpreter cannot multiply bfloat16."""
    is_interpreted = isinstance(_attend, InterpretedFunction)
    halves = (torch.float16,) if is_interpreted else (torch.float16, torch.bfloat16)
    return query_dtype == key_dtype and key_dtype in halves
