"""What a sweep will compute for, from passes over its first layers before there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from bough.protocol.cost_curve import CostCurve
from bough.sizing.row_counts import RowCounts

TRIED_ROWS = (8, 64)  # beside the fewest and the most, while there is time
ENOUGH_SECONDS = 0.5  # of trying; the fewest and the most rows are tried in any case
TIMES = 3  # of which the shortest count: others may be computing
LEAST_SECONDS = 1e-6


class PassSeconds(NamedTuple):
    """Of a pass through one layer and the head."""

    layer: float
    rest: float


def compute_curve(
    one_layer: Callable[[int], PassSeconds],
    counts: RowCounts,
    most_tokens: int,
    num_layers: int,
    clock: Callable[[], float] = time.perf_counter,
) -> CostCurve:
    """Seconds that a sweep of all layers computes for: the head, and as many times a layer as there are.

    `one_layer` passes so many tokens through one, at most `most_tokens`. These are the very products, attention and
    threads of a sweep: nothing is assumed but that layers are alike, and that a layer's weights are in no cache or take
    little to read.
    """
    began, seconds = clock(), dict[int, float]()
    least, most = counts.step, max(counts.step, min(counts.most, most_tokens) // counts.step * counts.step)
    for rows in (least, most, *map(counts.padded, TRIED_ROWS)):
        if rows in seconds or rows > most or (len(seconds) > 1 and clock() - began > ENOUGH_SECONDS):
            continue
        layers, rests = zip(*(one_layer(min(rows, most_tokens)) for _ in range(TIMES)), strict=True)  # the others pad
        seconds[rows] = max(LEAST_SECONDS, min(rests) + min(layers) * num_layers)
    tried = sorted(seconds)
    rising = accumulate((seconds[rows] for rows in tried), max)
    return CostCurve(tuple(tried), tuple(rising), counts.step)
