"""Row-wise parts of a Llama-like layer for compiled code: norms, rotary embeddings, gates.

Rows are SIMD lanes, LANES to a block; inputs of products are written in the form that products read.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from bough.model.cpu.float_bits import rounded, widened
from bough.model.cpu.jit import fastmath_inner, fastmath_parallel
from bough.model.cpu.llvm_vectors import LANES
from bough.model.cpu.operands import LINE, put
from bough.model.cpu.simd import (
    all_lanes,
    bits,
    exp_below_zero,
    load,
    magnitude,
    multiply_add,
    square_root,
    store,
    where_positive,
)
from bough.model.cpu.work_stealing import shared

Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]  # of bfloat16


@fastmath_parallel
def spread(rows: Any, hidden: Any) -> Any:
    """Convert rows of bfloat16 bits to float32 in blocks of LANES; lanes beyond the last row are 0."""
    for block in numba.prange(len(hidden)):
        for lane in range(LANES):
            row = block * LANES + lane
            for i in range(rows.shape[1]):
                hidden[block, i, lane] = widened(rows[row, i]) if row < len(rows) else 0


@fastmath_parallel
def collect(hidden: Any, rows: Any) -> Any:
    """The inverse of `spread`, rounded."""
    for row in numba.prange(len(rows)):
        here, lane = hidden[row // LANES], row % LANES
        for i in range(rows.shape[1]):
            rows[row, i] = rounded(here[i, lane])


@fastmath_inner
def _normalise(block: Any, hidden: Any, weight: Any, epsilon: Any, rows: Any) -> Any:
    """RMS norm (arXiv 1910.07467) of a block."""
    here, normed = hidden[block], np.empty((LINE, LANES), np.float32)
    # Two sums of squares: a single one would wait for its own latency.
    even, odd = all_lanes(np.float32(0)), all_lanes(np.float32(0))
    for i in range(0, len(weight), 2):
        first, second = load(here, i), load(here, i + 1)
        even, odd = multiply_add(first, first, even), multiply_add(second, second, odd)
    mean = (even + odd) / all_lanes(np.float32(len(weight)))
    factor = all_lanes(np.float32(1)) / square_root(mean + all_lanes(np.float32(epsilon)))
    for begin in range(0, len(weight), LINE):
        count = min(LINE, len(weight) - begin)
        for i in range(count):
            store(normed, i, load(here, begin + i) * factor * all_lanes(weight[begin + i]))
        put(normed[:count], rows, block, begin)


@fastmath_inner
def share_norms(taken: Any, thread: Any, num_threads: Any, hidden: Any, weight: Any, epsilon: Any, rows: Any) -> Any:
    """RMS norms of hidden (blocks, hidden, LANES) as rows of a product: a thread's share."""
    for block in shared(taken, thread, num_threads, len(hidden)):
        _normalise(block, hidden, weight, epsilon, rows)


@fastmath_inner
def rotate(head: Any, norm: Any, epsilon: Any, cos: Any, sin: Any, out: Any) -> Any:
    """Apply a query's or key's own norm, if any, and its rotary embedding (arXiv 2104.09864); writes bfloat16 bits."""
    half = len(head) // 2
    if len(norm):
        total = np.float32(0)
        for d in range(len(head)):
            total += head[d] * head[d]
        factor = np.float32(1) / np.sqrt(total / np.float32(len(head)) + epsilon)
        for d in range(len(head)):
            head[d] *= factor * norm[d]
    if half % LANES == 0:
        for d in range(0, half, LANES):
            low, high = load(head, d), load(head, d + half)
            store(out, d, bits(low * load(cos, d) - high * load(sin, d)))
            store(out, d + half, bits(high * load(cos, d + half) + low * load(sin, d + half)))
    else:
        for d in range(half):
            out[d] = rounded(head[d] * cos[d] - head[d + half] * sin[d])
            out[d + half] = rounded(head[d + half] * cos[d + half] + head[d] * sin[d + half])


@fastmath_inner
def round_to(numbers: Any, out: Any) -> Any:
    """Round to bfloat16 bits."""
    if len(numbers) % LANES == 0:
        for d in range(0, len(numbers), LANES):
            store(out, d, bits(load(numbers, d)))
    else:
        for d in range(len(numbers)):
            out[d] = rounded(numbers[d])


@fastmath_inner
def share_laying_out(taken: Any, thread: Any, num_threads: Any, numbers: Any, rows: Any) -> Any:
    """Write values (blocks, inputs, LANES) as rows of a product: a thread's share."""
    num_blocks, num_inputs = len(numbers), numbers.shape[1]
    for block in shared(taken, thread, num_threads, num_blocks):
        for begin in range(0, num_inputs, LINE):
            put(numbers[block, begin : min(begin + LINE, num_inputs)], rows, block, begin)


@fastmath_inner
def gate_line(gate: Any, up: Any, begin: Any, end: Any, gated: Any, block: Any) -> Any:
    """Compute gated = silu(gate) * up for inputs [begin, end) of a block, at most LINE."""
    values, zero, one = np.empty((end - begin, LANES), np.float32), all_lanes(np.float32(0)), all_lanes(np.float32(1))
    for i in range(begin, end):
        x = load(gate, i)
        power = exp_below_zero(zero - magnitude(x))
        store(values, i - begin, x * load(up, i) * where_positive(x, one, power) / (one + power))
    put(values, gated, block, begin)
