"""Ratios of paired measurements, with confidence intervals."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, TypeVar

import numpy as np

NUM_RESAMPLES = 4000
INTERVAL = (2.5, 97.5)  # percent

Value = TypeVar("Value")


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers.

    Raises:
        ValueError: there are no values, or one is not above 0.
    """
    if not values or min(values) <= 0:
        raise ValueError(f"rates: must be at least one, all above 0, got {list(values)}")
    return math.exp(fmean(map(math.log, values)))


def ratio(ours: Sequence[float], theirs: Sequence[float], seed: int, num_digits: int = 3) -> dict[str, Any]:
    """Ratios of ours to theirs, paired: geometric mean, its 95 % bootstrap interval, minimum and maximum.

    Raises:
        ValueError: the numbers of values differ, or one value is not above 0.
    """
    pairs = [geometric_mean([a]) / geometric_mean([b]) for a, b in zip(ours, theirs, strict=True)]
    return {
        "geomean": round(geometric_mean(pairs), num_digits),
        "interval": interval(pairs, geometric_mean, seed, num_digits),
        "worst": round(min(pairs), num_digits),
        "best": round(max(pairs), num_digits),
    }


def interval(
    values: Sequence[Value], statistic: Callable[[Sequence[Value]], float], seed: int, num_digits: int = 3
) -> list[float]:
    """The 95 % bootstrap interval of a statistic of some values."""
    rng = random.Random(seed)
    figures = [statistic(rng.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES)]
    low, high = np.percentile(figures, INTERVAL)
    return [round(float(low), num_digits), round(float(high), num_digits)]
