"""The largest logits of every row: what a draft step needs of 49,152 numbers is a few hundred."""

from __future__ import annotations

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from bough.model.lanes import all_lanes, at_least, larger, load, lowest, store
from bough.model.vectors import LANES

SPAN = 64 * LANES  # logits of which the largest in each lane are found first
ROOM = 4  # times as many as are wanted: what may be found of a row before it is left to torch
LAST = np.iinfo(np.int64).max  # sorts behind all that is found


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
    numbers = logits.numpy()
    found, counts = np.empty((len(numbers), ROOM * num), np.int64), np.empty(len(numbers), np.int64)
    _find(numbers, numbers.view(np.int32), num_spans, num, found, counts)
    found.sort(axis=1)
    tokens = (found[:, :num] & 0xFFFFFFFF).astype(np.int32)
    is_found = np.arange(num) < counts[:, None]
    nothing = np.where(counts == 0, np.nan, -np.inf).astype(np.float32)[:, None]
    values = np.where(is_found, np.take_along_axis(numbers, tokens, 1), nothing)
    for row in np.flatnonzero(counts > found.shape[1]).tolist():  # much of it is alike
        (values[row],), (tokens[row],) = _by_torch(logits[row : row + 1], num)
    return values, np.where(is_found, tokens, 0)


def _by_torch(logits: torch.Tensor, num: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    top = logits.topk(min(num, logits.shape[1]), dim=1)
    return top.values.cpu().numpy(), top.indices.cpu().numpy().astype(np.int32)


@numba.njit(fastmath=False, cache=True)
def _note(found, count, bits, token):  # type: ignore[no-untyped-def]
    """Puts a logit where there is room: a whole number by which larger ones come first, and of equals the lower token.

    The token is its low half. Returns how many have been found.
    """
    if count < len(found):
        upwards = bits[token] ^ ((bits[token] >> 31) & 0x7FFFFFFF)  # in the order of the float32 with these bits
        found[count] = (np.int64(~upwards) << 32) | token
    return count + 1


@numba.njit(fastmath=False, cache=True, parallel=True)
def _find(logits, bits, num_spans, num, found, counts):  # type: ignore[no-untyped-def]
    """Of each row the logits not below its `num`-th largest maximum, as `_note` puts them, and how many these are."""
    vocab_size = logits.shape[1]
    in_lanes = vocab_size // LANES * LANES
    for row in numba.prange(len(logits)):
        numbers = logits[row]
        maxima = np.empty(num_spans * LANES, np.float32)
        for span in range(num_spans):
            most = all_lanes(np.float32(-np.inf))
            for place in range(span * SPAN, (span + 1) * SPAN, LANES):
                most = larger(most, load(numbers, place))
            store(maxima, span * LANES, most)
        threshold = np.partition(maxima, len(maxima) - num)[len(maxima) - num]
        least, count = all_lanes(threshold), 0
        for place in range(0, in_lanes, LANES):
            which = at_least(load(numbers, place), least)
            while which != 0:
                token = place + lowest(which)
                which &= which - 1
                count = _note(found[row], count, bits[row], token)
        for token in range(in_lanes, vocab_size):
            if numbers[token] >= threshold:
                count = _note(found[row], count, bits[row], token)
        counts[row] = count
        found[row, min(count, found.shape[1]) :] = LAST
