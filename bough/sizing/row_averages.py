"""Robust running averages of a quantity, such as seconds, that depends on the number of rows and drifts over time."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import numpy as np
from numpy.typing import NDArray

from bough.protocol.cost_curve import CostCurve
from bough.sizing.curve_arrays import seconds_at
from bough.trees.acceptance import falling

FLAT = CostCurve((1, 2), (1.0, 1.0))
WINDOW = 32  # most samples of a bucket
TRUST = 3.0  # weight, in samples, of the estimate from neighbouring buckets
TRUST_GIVEN = 0.5  # and of a given scale: it may have been measured while other programs used the processor
FADING_SAMPLES = 4.0  # samples of a bucket for which the neighbours' estimate loses a weight of 1
HALF_WEIGHT_DISTANCE = 0.35  # log distance from the nearest sample at which that estimate has half its weight
NEIGHBOUR_DECAY = 0.25  # factor by which a sample's weight drops for each bucket of distance
KNOWN_SAMPLES = 3  # samples of a bucket from which a change can be detected
CHANGE_RUN = 3  # consecutive samples with residuals of the same sign that indicate a change
CLEAR_RUN = 2  # or so many, if each deviates by more than CLEAR times what is needed
CLEAR = 2.0
CHANGE_STEP = math.log(1.15)  # least residual that indicates a change
CLIP = 3.0  # samples are clipped at this many median deviations
LEAST_DEVIATION = 0.02


class _Bucket:
    """Recent samples with similar numbers of rows: log rows, and log ratios of value to shape."""

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
        """Means of log rows and of log ratios, the latter clipped at CLIP median deviations."""
        if self._average is None:
            places, ratios = zip(*self.samples, strict=True)
            middle = median(ratios)
            most = CLIP * max(LEAST_DEVIATION, median([abs(ratio - middle) for ratio in ratios]))
            low, high = middle - most, middle + most
            clipped = sum([low if ratio < low else high if ratio > high else ratio for ratio in ratios])
            self._average = sum(places) / len(places), clipped / len(ratios)
        return self._average

    def distance(self, ratio: float) -> float:
        """The distance from `ratio` to the nearest sample."""
        return min(abs(sample - ratio) for _, sample in self.samples)


class RowAverages:
    """Averages of the ratio of samples to a shape, in buckets that double in rows.

    Between and beyond buckets, the value is the shape times the interpolated ratio. Values never decrease with rows:
    buckets that violate this are pooled.

    When `CHANGE_RUN` consecutive samples of known buckets deviate alike, by at least `CHANGE_STEP` and by more than
    usual, or `CLEAR_RUN` by far more, the quantity has changed as a whole: earlier samples are scaled by the median
    deviation, and new ones soon outweigh them. Consecutive outliers seldom deviate alike; if they do, the samples that
    follow change it back.
    """

    def __init__(self, shape: CostCurve, rows: NDArray[np.int64], is_given: bool = False) -> None:
        """`values` is for these ascending `rows`; with `is_given` the shape's scale counts as TRUST_GIVEN samples."""
        self._shape = shape
        self._log_rows, self._shape_values = np.log(rows), seconds_at(shape, rows)
        self._of_shape = TRUST_GIVEN if is_given else 0.0
        self._anchor = 0.0  # log scale of the shape
        self._buckets: dict[int, _Bucket] = {}  # by log2 of rows, rounded up: kernels' tiles end at powers of two
        self._residuals: deque[float] = deque(maxlen=WINDOW)
        self._run: deque[tuple[int, float]] = deque(maxlen=CHANGE_RUN)  # bucket and residual of deviating samples
        self._fitted: tuple[list[float], list[float]] | None = None  # log rows, ascending, and log ratios

    @property
    def is_known(self) -> bool:
        """Whether there is a sample or a given shape."""
        return bool(self._buckets or self._of_shape)

    def observe(self, rows: int, value: float) -> None:
        """Add a sample; `value` must be above 0."""
        where, number = math.log(rows), (rows - 1).bit_length()
        ratio = math.log(value) - self._log_shape(where)
        bucket = self._buckets.setdefault(number, _Bucket())
        if len(bucket.samples) >= KNOWN_SAMPLES:
            self._compare(number, ratio - self._ratio(where))
        bucket.add(where, ratio)
        self._fitted = None
        if self._has_changed():
            self._step()

    def value(self, rows: int) -> float:
        """The average for any number of rows; `is_known` must be true."""
        where = math.log(rows)
        return math.exp(self._log_shape(where) + self._ratio(where))

    def values(self) -> NDArray[np.float64]:
        """The averages for the `rows` given at creation; `is_known` must be true."""
        values = self._shape_values * np.exp(np.interp(self._log_rows, *self._fit()))
        rising: NDArray[np.float64] = np.maximum.accumulate(values)
        return rising

    def _compare(self, number: int, residual: float) -> None:
        """Continue or end the run; what is usual is learnt from its residuals only once they are no change."""
        least = self._least_step()
        if len(self._run) == CHANGE_RUN:
            self._residuals.append(abs(self._run.popleft()[1]))
        if abs(residual) <= least or (self._run and (self._run[-1][1] > 0) != (residual > 0)):
            self._residuals.extend(abs(each) for _, each in self._run)
            self._run.clear()
        if abs(residual) > least:
            self._run.append((number, residual))
        else:
            self._residuals.append(abs(residual))

    def _least_step(self) -> float:
        return max(CHANGE_STEP, CLIP * median(self._residuals)) if self._residuals else CHANGE_STEP

    def _has_changed(self) -> bool:
        """Whether the run tells a change: its residuals are alike, and many or large."""
        if len(self._run) < CLEAR_RUN:
            return False
        residuals, least = [abs(residual) for _, residual in self._run], self._least_step()
        spread = max(residuals) - min(residuals)
        is_clear = min(residuals) > CLEAR * least and spread <= least
        return is_clear or (len(residuals) == CHANGE_RUN and spread <= 2 * least)

    def _step(self) -> None:
        """Scale the samples before the run; each bucket keeps its average, with a weight of KNOWN_SAMPLES samples."""
        shift = median([residual for _, residual in self._run])
        later = [(number, self._buckets[number].pop()) for number, _ in reversed(self._run)]
        for bucket in self._buckets.values():
            if bucket.samples:
                where, ratio = bucket.average
                bucket.clear()
                bucket.add(where, ratio + shift, times=KNOWN_SAMPLES)
        for number, (where, ratio) in reversed(later):
            self._buckets[number].add(where, ratio)
        self._anchor += shift
        self._run.clear()

    def _log_shape(self, where: float) -> float:
        return math.log(self._shape.unpadded(math.exp(where)))

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
            if trust := max(0.0, TRUST - size / FADING_SAMPLES):
                near = [
                    NEIGHBOUR_DECAY ** abs(number - other) * count for other, count in zip(numbers, sizes, strict=True)
                ]
                weighted = sum(weight * other for weight, other in zip(near, means, strict=True))
                common = (weighted + self._of_shape * self._anchor) / (sum(near) + self._of_shape)
                if size > 1:
                    trust /= 1 + (self._buckets[number].distance(common) / HALF_WEIGHT_DISTANCE) ** 2
                ratio = (size * mean + trust * common) / (size + trust)
            values.append(shape + ratio)
        rising = [-value for value in falling([-value for value in values], sizes)]
        return list(places), [value - shape for value, shape in zip(rising, shapes, strict=True)]
