"""Running averages of a quantity that depends on the number of rows, and changes while it is watched."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

from bough.protocol.cost_curve import CostCurve

FLAT = CostCurve((1, 2), (1.0, 1.0))
WINDOW = 32  # samples of a bucket
TRUST = 3.0  # samples that a given shape is worth, and what the shape makes of a bucket's neighbours
FADING = 4.0  # samples of a bucket after which these are worth one less
FAR = 0.35  # from it, where even the nearest of two or more samples is, at which it is worth half; in logarithms
NEAR = 0.25  # times as much a sample counts for a bucket that is one further
KNOWN = 3  # samples of a bucket that can say that something has changed
RUN = 3  # samples in a row, all too long or all too short, that say so
STEP = math.log(1.15)  # too long or too short, where samples are not commonly so far off
CLIP = 3.0  # times the median deviation, beyond which a sample counts as if it were there
LEAST_DEVIATION = 0.02


class _Bucket:
    """The last samples of rows that are alike: their rows, and what they are over the shape, both in logarithms."""

    def __init__(self) -> None:
        self.samples: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._average: tuple[float, float] | None = None

    def add(self, where: float, ratio: float, times: int = 1) -> None:
        self.samples.extend([(where, ratio)] * times)
        self._average = None

    def pop(self) -> tuple[float, float]:
        self._average = None
        return self.samples.pop()

    def clear(self) -> None:
        self.samples.clear()
        self._average = None

    @property
    def average(self) -> tuple[float, float]:
        """Of rows and ratios; of these no sample is further from the median than so many median deviations."""
        if self._average is None:
            places, ratios = zip(*self.samples, strict=True)
            middle = median(ratios)
            most = CLIP * max(LEAST_DEVIATION, median([abs(ratio - middle) for ratio in ratios]))
            low, high = middle - most, middle + most
            clipped = sum([low if ratio < low else high if ratio > high else ratio for ratio in ratios])
            self._average = sum(places) / len(places), clipped / len(ratios)
        return self._average

    def distance(self, ratio: float) -> float:
        """From it to the nearest sample."""
        return min(abs(sample - ratio) for _, sample in self.samples)


class RowAverages:
    """Averages in buckets of a factor of two, taken of what samples are over a shape, so that they keep that shape.

    Between buckets, and beyond them, what is known is the shape times the ratio of the nearest ones. Averages never
    fall as rows grow: buckets that say so are averaged together.

    When `RUN` samples in a row, of buckets that are known, are off alike, by `STEP` and by more than is common,
    everything has become so much longer or shorter: all that was seen before is scaled by their median, keeps its
    shape, and is soon outweighed by what comes. Outliers that happen to follow one another are not off alike.
    """

    def __init__(self, shape: CostCurve, rows: NDArray[np.int64], is_given: bool = False) -> None:
        """`rows`, which ascend, are those that are asked for.

        `is_given`: the shape is believed, scale included, as much as `TRUST` samples; else it is only assumed.
        """
        self._shape = shape
        self._log_rows, self._shape_values = np.log(rows), shape.at(rows)
        self._of_shape = TRUST if is_given else 0.0
        self._anchor = 0.0  # logarithm of what the shape has been scaled by
        self._buckets: dict[int, _Bucket] = {}  # by log2 of rows
        self._residuals: deque[float] = deque(maxlen=WINDOW)
        self._run: deque[tuple[int, float]] = deque(maxlen=RUN)  # bucket and residual of the last that are off
        self._fitted: tuple[list[float], list[float]] | None = None  # log rows, ascending, and log ratios

    @property
    def is_known(self) -> bool:
        """Whether there was a sample, or the shape is believed."""
        return bool(self._buckets or self._of_shape)

    def observe(self, rows: int, value: float) -> None:
        """A sample, which is above 0."""
        where, number = math.log(rows), rows.bit_length()
        ratio = math.log(value) - self._log_shape(where)
        bucket = self._buckets.setdefault(number, _Bucket())
        if len(bucket.samples) >= KNOWN:
            self._compare(number, ratio - self._ratio(where))
        bucket.add(where, ratio)
        self._fitted = None
        if len(self._run) == RUN and self._is_alike():
            self._step()

    def value(self, rows: int) -> float:
        """Of any number of rows; something must be known."""
        where = math.log(rows)
        return math.exp(self._log_shape(where) + self._ratio(where))

    def values(self) -> NDArray[np.float64]:
        """Of all the numbers of rows that were given at the start; something must be known."""
        values = self._shape_values * np.exp(np.interp(self._log_rows, *self._fit()))
        rising: NDArray[np.float64] = np.maximum.accumulate(values)
        return rising

    def _compare(self, number: int, residual: float) -> None:
        least = self._least_step()
        self._residuals.append(abs(residual))
        if abs(residual) <= least or (self._run and (self._run[-1][1] > 0) != (residual > 0)):
            self._run.clear()
        if abs(residual) > least:
            self._run.append((number, residual))

    def _least_step(self) -> float:
        return max(STEP, CLIP * median(self._residuals)) if self._residuals else STEP

    def _is_alike(self) -> bool:
        residuals = [residual for _, residual in self._run]
        return max(residuals) - min(residuals) <= 2 * self._least_step()

    def _step(self) -> None:
        """What was before the run is scaled; of each bucket its average stays, as so many samples as make it known."""
        shift = median([residual for _, residual in self._run])
        later = [(number, self._buckets[number].pop()) for number, _ in reversed(self._run)]
        for bucket in self._buckets.values():
            if bucket.samples:
                where, ratio = bucket.average
                bucket.clear()
                bucket.add(where, ratio + shift, times=KNOWN)
        for number, (where, ratio) in reversed(later):
            self._buckets[number].add(where, ratio)
        self._anchor += shift
        self._run.clear()

    def _log_shape(self, where: float) -> float:
        rows, seconds, place = self._shape.rows, self._shape.seconds, math.exp(where)
        if place <= rows[0]:
            return math.log(seconds[0])
        if place >= rows[-1]:
            return math.log(seconds[-1] + self._shape.last_slope * (place - rows[-1]))
        right = bisect_left(rows, place)
        slope = (seconds[right] - seconds[right - 1]) / (rows[right] - rows[right - 1])
        return math.log(seconds[right - 1] + slope * (place - rows[right - 1]))

    def _ratio(self, where: float) -> float:
        return float(np.interp(where, *self._fit()))

    def _fit(self) -> tuple[list[float], list[float]]:
        if self._fitted is None:
            self._fitted = self._new_fit()
        return self._fitted

    def _new_fit(self) -> tuple[list[float], list[float]]:
        if not self._buckets:
            return [0.0], [self._anchor]
        numbers = sorted(self._buckets)
        places, means = zip(*(self._buckets[number].average for number in numbers), strict=True)
        sizes = [len(self._buckets[number].samples) for number in numbers]
        shapes = [self._log_shape(where) for where in places]
        values = []
        for number, size, mean, shape in zip(numbers, sizes, means, shapes, strict=True):
            ratio = mean
            if trust := max(0.0, TRUST - size / FADING):
                near = [NEAR ** abs(number - other) * count for other, count in zip(numbers, sizes, strict=True)]
                weighted = sum(weight * other for weight, other in zip(near, means, strict=True))
                common = (weighted + self._of_shape * self._anchor) / (sum(near) + self._of_shape)
                if size > 1:
                    trust /= 1 + (self._buckets[number].distance(common) / FAR) ** 2
                ratio = (size * mean + trust * common) / (size + trust)
            values.append(shape + ratio)
        return list(places), [value - shape for value, shape in zip(_rising(values, sizes), shapes, strict=True)]


def _rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest values that never fall, by weighted squares: pools of adjacent violators."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, float(weight), 1
        while pools and pools[-1][0] > mean:
            before, of_before, num_before = pools.pop()
            mean = (before * of_before + mean * total) / (of_before + total)
            total, count = total + of_before, count + num_before
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]
