"""Top-k of every row of logits: a draft step needs a few hundred of 49,152 values."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from bough.model.cpu.jit import strict, strict_parallel
from bough.model.cpu.llvm_vectors import LANES
from bough.model.cpu.simd import all_lanes, at_least, larger, load, lowest, store

SPAN = 64 * LANES  # logits whose maximum in each SIMD lane is found first
ROOM = 4  # multiples of `num` that may be found in a row before it is left to torch


def largest(logits: torch.Tensor, num: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """The `num` largest logits of each row of (num_rows, vocab_size), and their tokens: (num_rows, num), descending.

    On a CPU the threshold is the `num`-th largest of maxima of parts of a row: at least `num` logits reach it, and few
    more. This is several times as fast as torch.topk. Rows with some NaN give unspecified tokens; rows of NaN give NaN.
    """
    num_spans = logits.shape[1] // SPAN
    if logits.device.type != "cpu" or num_spans * LANES < num:
        return _by_torch(logits, num)
    assert logits.stride(1) == 1, "vectors are read as neighbours"
    values, tokens = np.empty((len(logits), num), np.float32), np.empty((len(logits), num), np.int32)
    num_found = np.empty(len(logits), np.int64)
    numbers = logits.numpy()
    _find(numbers, numbers.view(np.int32), num_spans, values, tokens, num_found)
    for row in np.flatnonzero(num_found > ROOM * num).tolist():  # many equal logits
        (values[row],), (tokens[row],) = _by_torch(logits[row : row + 1], num)
    return values, tokens


def _by_torch(logits: torch.Tensor, num: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    top = logits.topk(min(num, logits.shape[1]), dim=1)
    return top.values.cpu().numpy(), top.indices.cpu().numpy().astype(np.int32)


@strict
def _note(found: Any, count: Any, bits: Any, token: Any) -> Any:
    """Store a logit as an int64 key that sorts larger logits first, and the lower token among equals.

    The key's low half is the token. Returns the number of logits found.
    """
    if count < len(found):
        upwards = bits[token] ^ ((bits[token] >> 31) & 0x7FFFFFFF)  # int32 in the order of the float32 with these bits
        found[count] = (np.int64(~upwards) << 32) | token
    return count + 1


# Sorting by hand: numpy's functions take numba seconds to compile.


@strict
def _nth_largest(numbers: Any, num: Any) -> Any:
    """Reorder `numbers` in place and return the num-th largest (Hoare's quickselect)."""
    place, first, last = len(numbers) - num, 0, len(numbers) - 1
    while first < last:
        pivot, low, high = numbers[place], first, last
        while low <= high:
            while numbers[low] < pivot:
                low += 1
            while pivot < numbers[high]:
                high -= 1
            if low <= high:
                numbers[low], numbers[high] = numbers[high], numbers[low]
                low, high = low + 1, high - 1
        if high < place:
            first = low
        if place < low:
            last = high
    return numbers[place]


@strict
def _sort(numbers: Any) -> Any:
    """Sort ascending, in place (Shellsort)."""
    gap = len(numbers) // 2
    while gap > 0:
        for i in range(gap, len(numbers)):
            number, place = numbers[i], i
            while place >= gap and numbers[place - gap] > number:
                numbers[place] = numbers[place - gap]
                place -= gap
            numbers[place] = number
        gap //= 2


@strict
def _find_in_row(numbers: Any, bits: Any, num_spans: Any, num: Any, found: Any) -> Any:
    """Store all logits that reach the threshold with `_note`; returns their number."""
    maxima, in_lanes = np.empty(num_spans * LANES, np.float32), len(numbers) // LANES * LANES
    for span in range(num_spans):
        most = all_lanes(np.float32(-np.inf))
        for place in range(span * SPAN, (span + 1) * SPAN, LANES):
            most = larger(most, load(numbers, place))
        store(maxima, span * LANES, most)
    threshold = _nth_largest(maxima, num)
    least, count = all_lanes(threshold), 0
    for place in range(0, in_lanes, LANES):
        which = at_least(load(numbers, place), least)
        while which != 0:
            token = place + lowest(which)
            which &= which - 1
            count = _note(found, count, bits, token)
    for token in range(in_lanes, len(numbers)):
        if numbers[token] >= threshold:
            count = _note(found, count, bits, token)
    return count


@strict_parallel
def _find(logits: Any, bits: Any, num_spans: Any, values: Any, tokens: Any, num_found: Any) -> Any:
    """Write each row's largest, in order, to values and tokens (num_rows, num), and how many reached the threshold.

    Missing values are -inf; all are NaN if none was found.
    """
    num = values.shape[1]
    for row in numba.prange(len(logits)):
        found = np.empty(ROOM * num, np.int64)
        count = _find_in_row(logits[row], bits[row], num_spans, num, found)
        num_found[row] = count
        kept = min(count, num)
        _sort(found[: min(count, len(found))])
        for place in range(kept):
            token = np.int32(found[place] & 0xFFFFFFFF)
            values[row, place], tokens[row, place] = logits[row, token], token
        values[row, kept:] = -np.inf if count else np.nan
        tokens[row, kept:] = 0
