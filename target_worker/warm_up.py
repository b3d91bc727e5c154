"""What a sweep will compute for, from passes over its first layers before there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate

from bough.row_counts import RowCounts
from bough.sizing.cost_curve import CostCurve

TRIED_ROWS = (8, 64)  # beside the fewest and the most, while there is time
ENOUGH_SECONDS = 0.5  # of trying; the fewest and the most rows are tried in any case
TIMES = 2  # of which the shorter counts: others may be computing
LEAST_SECONDS = 1e-6

PassSeconds = Callable[[int, int], float]  # of computing, by rows and by layers: 0, which is the head alone, or 1


def compute_curve(
    pass_seconds: PassSeconds,
    counts: RowCounts,
    most_rows: int,
    num_layers: int,
    clock: Callable[[], float] = time.perf_counter,
) -> CostCurve:
    """Seconds that a sweep of all layers computes for: the head, and as many times a layer as there are.

    At most `most_rows` tokens are tried. These are the very products, attention and threads of a sweep: nothing is
    assumed but that layers are alike.
    """
    began, seconds = clock(), dict[int, float]()
    least, most = counts.step, max(counts.step, min(counts.most, most_rows) // counts.step * counts.step)
    for rows in (least, most, *map(counts.padded, TRIED_ROWS)):
        if rows in seconds or rows > most or (len(seconds) > 1 and clock() - began > ENOUGH_SECONDS):
            continue
        num_tokens = min(rows, most_rows)  # the others pad
        head, with_layer = (min(pass_seconds(num_tokens, layers) for _ in range(TIMES)) for layers in (0, 1))
        seconds[rows] = max(LEAST_SECONDS, head + max(0.0, with_layer - head) * num_layers)
    tried = sorted(seconds)
    rising = accumulate((seconds[rows] for rows in tried), max)
    return CostCurve(tuple(tried), tuple(rising), counts.step)
