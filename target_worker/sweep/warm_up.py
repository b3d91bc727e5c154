"""Predicts the computing time of sweeps by measuring layer 0 before the first sweep."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from bough.protocol.cost_curve import CostCurve
from bough.sizing.row_counts import RowCounts

# Tried besides the fewest and the most rows, while time is left: tiles of kernels end at powers of two.
TRIED_ROWS = (8, 64, 16, 17, 32, 33)
ENOUGH_SECONDS = 0.5  # of measuring; the fewest and the most rows are always measured
TIMES = 3  # repetitions, of which the shortest counts, as other processes may be computing
LEAST_SECONDS = 1e-6


class PassSeconds(NamedTuple):
    """Seconds of a pass through one layer and the head."""

    layer: float
    rest: float


def compute_curve(
    one_layer: Callable[[int], PassSeconds],
    counts: RowCounts,
    most_tokens: int,
    num_layers: int,
    clock: Callable[[], float] = time.perf_counter,
) -> CostCurve:
    """Predict the seconds of computing in a sweep: the head, plus `num_layers` times one layer.

    `one_layer` passes a number of tokens, at most `most_tokens`, through one layer with a sweep's own kernels and
    threads. Layers are assumed to be alike, with weights that are not in a cache or are quick to read.
    """
    began, seconds = clock(), dict[int, float]()
    least, most = counts.step, max(counts.step, min(counts.most, most_tokens) // counts.step * counts.step)
    for rows in (least, most, *map(counts.padded, TRIED_ROWS)):
        if rows in seconds or rows > most or (len(seconds) > 1 and clock() - began > ENOUGH_SECONDS):
            continue
        layers, rests = zip(*(one_layer(min(rows, most_tokens)) for _ in range(TIMES)), strict=True)  # padded to `rows`
        seconds[rows] = max(LEAST_SECONDS, min(rests) + min(layers) * num_layers)
    tried = sorted(seconds)
    rising = accumulate((seconds[rows] for rows in tried), max)
    return CostCurve(tuple(tried), tuple(rising), counts.step)
