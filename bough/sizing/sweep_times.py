"""Seconds of a sweep, or of a draft step, by its rows, learnt from past ones."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bough.protocol.cost_curve import MAX_SECONDS, CostCurve
from bough.sizing.distinct_experts import ASSUMED_PARTS, DistinctExperts, Mixture
from bough.trees.acceptance import falling

WAITED = 0.05  # share of a sweep spent waiting for weights above which the link was the bottleneck
SHORTER = 0.9  # a sweep shorter than this share of the expected link time shows that the link is faster
LIKELY = 0.7  # assumed link time in sweeps that were shorter than it was believed to be, and did not wait
LEAST_SECONDS = 1e-7  # least compute time of a sweep
# The assumed shape before any sweep: a fixed cost of 32 rows. On two cores of a Zen 5 a sweep of resident weights takes
# 0.13 s with one row and 1.18 s with 256.
ASSUMED = CostCurve((1, 257), (33.0, 289.0))
FLAT = CostCurve((1, 2), (1.0, 1.0))
WINDOW = 32  # most samples of a bucket
TRUST = 3.0  # weight, in samples, of the estimate from neighbouring buckets
TRUST_GIVEN = 0.5  # the same for a given scale: it may have been measured while other programs used the processor
FADING_SAMPLES = 4.0  # samples of a bucket for which the neighbours' estimate loses a weight of 1
HALF_WEIGHT_DISTANCE = 0.35  # log distance from the nearest sample at which the estimate has half its weight
NEIGHBOUR_DECAY = 0.25  # factor by which a sample's weight drops for each bucket of distance
KNOWN_SAMPLES = 3  # samples of a bucket from which a change can be detected
CHANGE_RUN = 3  # consecutive samples with residuals of the same sign that indicate a change
CLEAR_RUN = 2  # or this many, if each deviates by more than CLEAR times the needed change
CLEAR = 2.0
CHANGE_STEP = math.log(1.15)  # least residual that indicates a change
CLIP = 3.0  # samples are clipped at this many median deviations
LEAST_DEVIATION = 0.02


def seconds_at(curve: CostCurve, rows: ArrayLike) -> NDArray[np.float64]:
    """Seconds for each of these numbers of rows."""
    padded: NDArray[np.int64] = -(-np.maximum(rows, 1) // curve.step) * curve.step
    inside: NDArray[np.float64] = np.interp(padded, curve.rows, curve.seconds)
    return inside + curve.last_slope * np.maximum(padded - curve.rows[-1], 0)


def sizes_up_to(curve: CostCurve, most: int) -> NDArray[np.int64]:
    """The multiples of the curve's `step` up to `most`, and `most` itself: the only candidates for a best size."""
    edges = np.arange(curve.step, most + 1, curve.step)
    return edges if len(edges) and edges[-1] == most else np.append(edges, most)


class SweepTimes:
    """Learns the seconds of a sweep: the maximum of link and compute time. A draft step is a sweep without a link.

    Compute time is the time not spent waiting, by padded rows. Link time is learnt only from sweeps that waited for the
    link: a sweep that computed for longer gives only an upper bound. Used as a sample, it would make the link look
    slow, trees would grow, sweeps would compute for longer still, and so on.

    Until a sweep has waited, the given link time counts. It is too long if processes that started together shared the
    link. A sweep that took less without waiting disproves it: the link is then assumed to be faster than that sweep,
    and trees shrink until sweeps wait.

    Link time is the seconds of a byte, averaged over all sweeps, times the bytes of a sweep, which in a mixture of
    experts grow with its rows: the speed of the link is assumed not to depend on rows.

    In a mixture the shapes of both, by rows, follow the number of distinct experts that rows choose.
    """

    def __init__(
        self,
        step: int,
        most_rows: int,
        compute: CostCurve | None = None,
        link_bytes: int = 0,
        link_seconds: float = 0.0,
        mixture: Mixture | None = None,
    ) -> None:
        """Rows are padded to multiples of `step`, which is 1 if padding costs little, as in mixtures of experts.

        The others are known before: `compute` seconds by rows, whose scale the first sweeps correct; `link_bytes` that
        cross the link in each sweep, 0 if none or unknown, and the `link_seconds` that they take, until a sweep waits;
        and of a `mixture` how many experts rows choose, and their bytes.
        """
        self._step = step
        self._rows = grid(step, most_rows)
        self._compute = RowAverages(compute or ASSUMED, self._rows, is_given=compute is not None)
        has_link = link_bytes > 0 and link_seconds > 0
        num_bytes, seconds = (link_bytes, link_seconds) if has_link else (1, 1.0)
        self._volume = RowAverages(FLAT.scaled(num_bytes), self._rows, has_link)
        self._byte_seconds = RowAverages(FLAT.scaled(seconds / num_bytes), np.ones(1, np.int64))
        self._assumed = seconds / num_bytes if has_link else math.inf  # seconds of a byte, until a sweep has waited
        self._experts = DistinctExperts(mixture, self._rows) if mixture is not None else None
        self._has_parts = compute is None  # in a mixture: seconds of experts and rows are to be found
        if self._experts is not None:
            self._reshape(self._experts)
        self._fit: _FittedSweep | None = None

    def observe(
        self,
        rows: int,
        total_seconds: float,
        wait_seconds: float = 0.0,
        link_bytes: int = 0,
        expert_ratio: float = 0.0,
    ) -> None:
        """Add a sweep, which waited `wait_seconds` of its time for weights; `link_bytes` crossed the link.

        `expert_ratio` is the number of distinct experts chosen over that of one row, 0 if unknown. Draft steps that
        also compute context must not be observed.
        """
        if rows < 1 or total_seconds <= 0:
            return
        padded = -(-rows // self._step) * self._step
        self._compute.observe(padded, max(total_seconds - wait_seconds, LEAST_SECONDS))
        self._volume.observe(padded, max(1.0, link_bytes))
        if self._experts is not None:
            self._experts.observe(rows, expert_ratio)
            self._reshape(self._experts)
        self._observe_link(total_seconds / self._volume.value(padded), wait_seconds > WAITED * total_seconds)
        self._fit = None

    @property
    def mixture(self) -> Mixture | None:
        """The model's experts, if it has any."""
        return self._experts.mixture if self._experts is not None else None

    def expert_ratio(self, rows: int) -> float:
        """Distinct experts that `rows` rows are expected to choose, over those of one; 0 if there are no experts."""
        return float(self._experts.at(rows)) if self._experts is not None else 0.0

    def _reshape(self, experts: DistinctExperts) -> None:
        self._volume.reshape(experts.link_bytes())
        if self._has_parts:
            averages = self._compute.averages()
            parts = experts.fitted_parts(*averages) if averages is not None else ASSUMED_PARTS
            self._compute.reshape(np.maximum(LEAST_SECONDS, experts.seconds(parts)))

    def _observe_link(self, byte_seconds: float, has_waited: bool) -> None:
        known = self._byte_seconds
        if has_waited or (known.is_known and byte_seconds < SHORTER * known.value(1)):
            known.observe(1, byte_seconds)
        elif not known.is_known and byte_seconds < self._assumed < math.inf:
            self._assumed = LIKELY * byte_seconds

    def curve(self) -> CostCurve | None:
        """The cost curve; None while nothing is known."""
        fit = self._fitted()
        return fit.curve if fit is not None else None

    @property
    def knee(self) -> float:
        """The most rows whose compute time is within the link time; infinite if no limit is known."""
        fit = self._fitted()
        return fit.knee if fit is not None else math.inf

    @property
    def free_rows(self) -> float:
        """As `knee`, but 0 if no link is known."""
        return self.knee if self._byte_seconds.is_known or self._assumed < math.inf else 0.0

    def _fitted(self) -> _FittedSweep | None:
        if self._fit is None and self._compute.is_known:
            byte_seconds = self._byte_seconds.value(1) if self._byte_seconds.is_known else self._assumed
            link = byte_seconds * self._volume.values() if byte_seconds < math.inf else None
            self._fit = _fit(self._rows, self._compute.values(), link, self._step)
        return self._fit


class _FittedSweep(NamedTuple):
    curve: CostCurve
    knee: float


def grid(step: int, most_rows: int) -> NDArray[np.int64]:
    """The knots of a curve: multiples of `step` up to `most_rows`, three in every factor of two.

    Kernels work in tiles of a power of two of rows, and seconds may jump after one: the next size is a knot, too.
    """
    powers = 2.0 ** np.arange(math.ceil(math.log2(max(2, most_rows))) + 1)
    candidates = np.concatenate((powers, powers + 1, 1.5 * powers, [most_rows]))
    padded = (-(-np.minimum(candidates, most_rows) // step)).astype(np.int64) * step
    unique: NDArray[np.int64] = np.unique(padded)
    return unique


def _fit(
    rows: NDArray[np.int64], compute: NDArray[np.float64], link: NDArray[np.float64] | None, step: int
) -> _FittedSweep:
    """The maximum of compute and link, with a knot on either side of each crossing."""
    if link is None:
        return _FittedSweep(to_curve(rows, compute, step), math.inf)
    is_longer = compute > link
    crossings = np.flatnonzero(is_longer[1:] != is_longer[:-1])
    knots, knee = [rows], 0.0 if is_longer[0] else math.inf
    for left in crossings:
        before, after = (link - compute)[left : left + 2]
        where = rows[left] + (rows[left + 1] - rows[left]) * before / (before - after)
        knee = float(where) if is_longer[left + 1] else knee
        below = int(where // step) * step
        knots.append(np.array([below, below + step]))
    every = np.unique(np.concatenate(knots))
    every = every[(every >= rows[0]) & (every <= rows[-1])]
    seconds = np.maximum(np.interp(every, rows, compute), np.interp(every, rows, link))
    return _FittedSweep(to_curve(every, seconds, step), math.inf if not is_longer.any() else knee)


def to_curve(rows: NDArray[np.int64], seconds: NDArray[np.float64], step: int) -> CostCurve:
    """The cost curve of ascending arrays."""
    return CostCurve(tuple(rows.tolist()), tuple(np.clip(seconds, LEAST_SECONDS, MAX_SECONDS).tolist()), step)


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

    When `CHANGE_RUN` consecutive samples of known buckets deviate equally, by at least `CHANGE_STEP` and by more than
    usual, or `CLEAR_RUN` by far more, the quantity has changed as a whole: earlier samples are scaled by the median
    deviation, and new ones soon outweigh them. Consecutive outliers seldom agree; if they do, the samples that
    follow change it back.
    """

    def __init__(self, shape: CostCurve, rows: NDArray[np.int64], is_given: bool = False) -> None:
        """`values` is for these ascending `rows`; with `is_given` the shape's scale counts as TRUST_GIVEN samples."""
        self._shape = shape
        self._rows, self._log_rows, self._shape_values = rows, np.log(rows), seconds_at(shape, rows)
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

    def averages(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]] | None:
        """Mean rows, mean values and numbers of samples of the buckets, (num_buckets,) each; None without samples."""
        if not self._buckets:
            return None
        buckets = self._buckets.values()
        places, ratios = np.array([bucket.average for bucket in buckets]).T
        sizes = np.array([float(len(bucket.samples)) for bucket in buckets])
        return np.exp(places), np.exp(ratios) * self._at(places), sizes

    def reshape(self, values: NDArray[np.float64]) -> None:
        """Replace the shape by these (num_rows,) values at the `rows` given at creation; all samples stay."""
        samples = [np.array(bucket.samples).T for bucket in self._buckets.values()]
        logs = [np.log(self._at(places)) + ratios for places, ratios in samples]
        self._shape, self._shape_values = CostCurve(tuple(self._rows.tolist()), tuple(values.tolist())), values
        for bucket, (places, _), own in zip(self._buckets.values(), samples, logs, strict=True):
            bucket.clear()
            bucket.samples.extend(zip(places.tolist(), (own - np.log(self._at(places))).tolist(), strict=True))
        self._fitted = None

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
        """Continue or end the run; its residuals count as usual deviations only once they are known to be no change."""
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
        """Whether the run indicates a change: its residuals agree, and are many or large."""
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

    def _at(self, places: NDArray[np.float64]) -> NDArray[np.float64]:
        """The shape at these log rows."""
        return np.asarray(np.interp(np.exp(places), self._shape.rows, self._shape.seconds))

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
