"""Ratios, paired by repeat: seconds of the best fixed size in hindsight over seconds self-sized."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

NUM_BOOTSTRAPS = 2000


class Score(NamedTuple):
    """Of one regime."""

    ratio: float  # geometric mean over the repeats that were scored; above 1 where self-sized trees are faster
    low: float  # of an interval of 95 %, by bootstrap over these repeats
    high: float
    best_fixed: str  # the size that was best on the other repeats
    plain_ratio: float  # seconds of plain decoding over seconds self-sized, over all repeats


def score(self_sized: Sequence[float], fixed: Mapping[str, Sequence[float]], plain: Sequence[float]) -> Score:
    """Chooses the best fixed size on the repeats of even number, and scores it on the others.

    Chosen and scored on the same repeats, the best of many would look better than it is (the winner's curse). Then the
    other way round, so that all repeats are scored.
    """
    logs: list[float] = []
    names = []
    for chosen_on, scored_on in ((0, 1), (1, 0)):
        best = min(fixed, key=lambda name: _mean_log(fixed[name][chosen_on::2]))
        names.append(best)
        pairs = zip(fixed[best][scored_on::2], self_sized[scored_on::2], strict=True)
        logs += [math.log(theirs / ours) for theirs, ours in pairs]
    low, high = interval(logs)
    plain_logs = [math.log(theirs / ours) for theirs, ours in zip(plain, self_sized, strict=True)]
    best = " / ".join(dict.fromkeys(names))
    return Score(math.exp(_mean(logs)), low, high, best, math.exp(_mean(plain_logs)))


def interval(logs: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Of the geometric mean, at 95 %; the same every time."""
    rng = Random(seed)
    means = sorted(math.exp(_mean(rng.choices(logs, k=len(logs)))) for _ in range(NUM_BOOTSTRAPS))
    return means[round(0.025 * NUM_BOOTSTRAPS)], means[round(0.975 * NUM_BOOTSTRAPS) - 1]


def geomean(ratios: Sequence[float]) -> float:
    """Of ratios above 0."""
    return math.exp(_mean([math.log(ratio) for ratio in ratios]))


def _mean_log(seconds: Sequence[float]) -> float:
    return _mean([math.log(each) for each in seconds])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
