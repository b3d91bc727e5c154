"""The largest logits of every row: what a draft step needs of 49,152 numbers is a few hundred."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from bough.model.cpu.jit import strict, strict_parallel
from bough.model.cpu.llvm_vectors import LANES
from bough.model.cpu.simd import all_lanes, at_least, larger, load, lowest, store

SPAN = 64 * LANES  # logits of which the largest in each lane are found first
ROOM = 4  # times as many as are wanted: what may be found of a row before it is left to torch


def largest(logits: torch.Tensor, num: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """The `num` largest of each row of (num_rows, vocab_size), and where they are: (num_rows, num) each, descending.

    On the CPU through maxima of parts of a row: at least `num` logits are not below the `num`-th largest maximum, and
    hardly more are. Several times as fast as torch's own. Of a row whose numbers are in part none anything may be
    found; one of nothing else gives none.
    """
    num_spans = logits.shape[1] // SPAN
    if logits.device.type != "cpu" or num_spans * LANES < num:
        return _by_torch(logits, num)
    assert logits.stride(1) == 1, "vectors are read as neighbours"
    values, tokens = np.empty((len(logits), num), np.float32), np.empty((len(logits), num), np.int32)
    num_found = np.empty(len(logits), np.int64)
    numbers = logits.numpy()
    _find(numbers, numbers.view(np.int32), num_spans, values, tokens, num_found)
    for row in np.flatnonzero(num_found > ROOM * num).tolist():  # much of it is alike
        (values[row],), (tokens[row],) = _by_torch(logits[row : row + 1], num)
    return values, tokens


def _by_torch(logits: torch.Tensor, num: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    top = logits.topk(min(num, logits.shape[1]), dim=1)
    return top.values.cpu().numpy(), top.indices.cpu().numpy().astype(np.int32)


@strict
def _note(found: Any, count: Any, bits: Any, token: Any) -> Any:
    """Puts a logit where there is room: a whole number by which larger ones come first, and of equals the lower token.

    The token is its low half. Returns how many have been found.
    """
    if count < len(found):
        upwards = bits[token] ^ ((bits[token] >> 31) & 0x7FFFFFFF)  # in the order of the float32 with these bits
        found[count] = (np.int64(~upwards) << 32) | token
    return count + 1


# Few numbers are put in order here: numpy's functions for it take seconds to compile.


@strict
def _nth_largest(numbers: Any, num: Any) -> Any:
    """Puts numbers in another order, by which it is found (Hoare's FIND)."""
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
    """Ascending, in place (Shell's sort)."""
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
    """The logits not below the `num`-th largest maximum, as `_note` puts them; how many these are."""
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
    """Puts each row's largest in their order into values and tokens, (num_rows, num), and how many could have been.

    Where there are fewer, -inf follows; where there are none, nothing but NaN.
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
