"""Seconds of a sweep by its rows, learnt from past sweeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.protocol.cost_curve import MAX_SECONDS, CostCurve
from bough.sizing.row_averages import FLAT, RowAverages

WAITED = 0.05  # share of a sweep spent waiting for weights above which the link was the bottleneck
SHORTER = 0.9  # a sweep shorter than this share of the expected link time shows that the link is faster
LIKELY = 0.7  # assumed link time in sweeps that were shorter than it was believed to be, and did not wait
LEAST_SECONDS = 1e-7  # least compute time of a sweep
# The assumed shape before any sweep: a fixed cost of 32 rows. On two cores of a Zen 5 a sweep of resident weights takes
# 0.13 s with one row and 1.18 s with 256.
ASSUMED = CostCurve((1, 257), (33.0, 289.0))


class SweepPrior(NamedTuple):
    """Prior knowledge of sweeps: of computing, whose scale the first sweeps correct; of the link until one waits."""

    step: int  # rows are padded to multiples of it; 1 if padding costs little, as in mixtures of experts
    compute: CostCurve | None = None  # compute seconds by rows; None is unknown
    link_bytes: int = 0  # bytes that cross the link in each sweep; 0 is none or unknown
    link_seconds: float = 0.0  # seconds that those bytes take
    volume: CostCurve | None = None  # shape of the bytes by rows, if rows choose the experts that cross the link


class SweepTimes:
    """Learns the seconds of a sweep: the maximum of link and compute time.

    Compute time is the time not spent waiting, by padded rows. Link time is learnt only from sweeps that waited for the
    link: a sweep that computed for longer gives only an upper bound. Used as a sample, it would make the link look
    slow, trees would grow, sweeps would compute for longer still, and so on.

    Until a sweep has waited, the prior's link time counts, which is too long if processes that started together shared
    the link. A sweep that took less without waiting disproves it: the link is then assumed to be faster than that sweep
    was, so that trees shrink until sweeps wait.

    Link time is the seconds of a byte, averaged over all sweeps, times the bytes of a sweep, which in a mixture of
    experts grow with its rows: the speed of the link is assumed not to depend on rows.
    """

    def __init__(self, step: int, most_rows: int, prior: SweepPrior | None = None) -> None:
        """Without a `prior`, rows are padded to multiples of `step`."""
        prior = prior or SweepPrior(step)
        self._step = step = prior.step
        self._rows = grid(step, most_rows)
        self._compute = RowAverages(prior.compute or ASSUMED, self._rows, is_given=prior.compute is not None)
        has_link = prior.link_bytes > 0 and prior.link_seconds > 0
        num_bytes, seconds = (prior.link_bytes, prior.link_seconds) if has_link else (1, 1.0)
        self._volume = RowAverages(prior.volume or FLAT.scaled(num_bytes), self._rows, has_link)
        self._byte_seconds = RowAverages(FLAT.scaled(seconds / num_bytes), np.ones(1, np.int64))
        self._assumed = seconds / num_bytes if has_link else math.inf  # seconds of a byte, until a sweep has waited
        self._fit: _FittedSweep | None = None

    def observe(self, rows: int, total_seconds: float, wait_seconds: float, link_bytes: int = 0) -> None:
        """Add a sweep, which waited `wait_seconds` of its time for weights; `link_bytes` crossed the link."""
        if rows < 1 or total_seconds <= 0:
            return
        padded = -(-rows // self._step) * self._step
        self._compute.observe(padded, max(total_seconds - wait_seconds, LEAST_SECONDS))
        self._volume.observe(padded, max(1.0, link_bytes))
        self._observe_link(total_seconds / self._volume.value(padded), wait_seconds > WAITED * total_seconds)
        self._fit = None

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

    def _fitted(self) -> _FittedSweep | None:
        if self._fit is None and self._compute.is_known:
            byte_seconds = self._byte_seconds.value(1) if self._byte_seconds.is_known else self._assumed
            link = byte_seconds * self._volume.values() if byte_seconds < math.inf else None
            self._fit = _fit(self._rows, self._compute.values(), link, self._step)
        return self._fit


@dataclass(frozen=True, slots=True)
class _FittedSweep:
    curve: CostCurve
    knee: float


def expert_volume(fixed_bytes: int, expert_bytes: int, chosen_share: float, most_rows: int) -> CostCurve:
    """A curve of bytes (in place of seconds) by rows: fixed bytes, and the experts that the rows choose together.

    Each row chooses `chosen_share` of the experts independently; real choices overlap more.
    """
    rows = grid(1, most_rows)
    num_bytes = fixed_bytes + expert_bytes * (1 - (1 - chosen_share) ** rows)
    return CostCurve(tuple(rows.tolist()), tuple(np.maximum(1.0, num_bytes).tolist()))


def grid(step: int, most_rows: int) -> NDArray[np.int64]:
    """The knots of a curve: multiples of `step` up to `most_rows`, three in every factor of two.

    Kernels work in tiles of a power of two of rows, so that seconds may jump behind one: the next size is a knot, too.
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
