"""The online softmax of attention on a GPU: Triton functions that fold one block of keys after another into a state.

The state of QUERIES rows is their highest score, the sum of weights, and the weighted sum of values.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
