"""How many distinct experts the rows of a sweep choose together, and how a sweep's time depends on it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

OVERLAPS = np.linspace(0.0, 0.95, 39)
NUM_RECENT = 64  # samples of a fit
# Assumed seconds of a sweep's fixed part and of each row, in units of the seconds of the experts that one row chooses.
ASSUMED_PARTS = np.array((2.0, 1.0, 3 / 32))
TRUST = 0.5  # weight of each assumption: the square root of a number of sweeps


class Mixture(NamedTuple):
    """A mixture of experts, and bytes that cross the link."""

    num_experts: int  # in a layer
    num_chosen: int  # of these, by a row
    fixed_bytes: int = 0  # in every sweep
    expert_bytes: int = 0  # of all experts that are not in memory, which are brought when rows choose them

    @property
    def chosen_share(self) -> float:
        """Share of a layer's experts that a row chooses."""
        return self.num_chosen / self.num_experts


def distinct_share(chosen_share: float, num_rows: ArrayLike, overlap: float = 0.0) -> NDArray[np.float64]:
    """The expected share of a layer's experts that `num_rows` rows choose together, if each chooses `chosen_share`.

    Rows of one text choose independently with probabilities that differ between experts and texts. These are assumed to
    have a beta distribution. `overlap` is the correlation of two rows' choices: 0 if all probabilities are equal, near
    1 if all rows choose the same experts.
    """
    rows = np.asarray(num_rows)
    if not overlap:
        return np.asarray(1 - (1 - chosen_share) ** rows)
    before = overlap * np.arange(rows.max())
    unused = np.cumprod(((1 - overlap) * (1 - chosen_share) + before) / (1 - overlap + before))
    return np.asarray(1 - unused[rows - 1])


class DistinctExperts:
    """Learns the overlap of rows' choices from the experts that sweeps chose.

    A ratio is the number of distinct experts over the number that one row chooses.
    """

    def __init__(self, mixture: Mixture, rows: NDArray[np.int64]) -> None:
        """`ratios` is for these ascending `rows`."""
        self.mixture = mixture
        self._rows, share = rows, mixture.chosen_share
        self._by_overlap = np.stack([distinct_share(share, rows, overlap) for overlap in OVERLAPS]) / share
        self._samples: deque[tuple[int, float]] = deque(maxlen=NUM_RECENT)
        self._best = 0

    @property
    def overlap(self) -> float:
        """The overlap that fits best; 0 before the first sample."""
        return float(OVERLAPS[self._best])

    @property
    def ratios(self) -> NDArray[np.float64]:
        """(num_rows,) expected ratios."""
        ratios: NDArray[np.float64] = self._by_overlap[self._best]
        return ratios

    def at(self, rows: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Expected ratios for any numbers of rows."""
        return np.asarray(np.interp(np.asarray(rows), self._rows, self.ratios))

    def observe(self, rows: int, ratio: float) -> None:
        """Add a sweep; one row says nothing, and an impossible ratio is ignored, such as 0 if none was counted."""
        if rows > 1 and 1.0 <= ratio <= min(rows, self.mixture.num_experts / self.mixture.num_chosen):
            self._samples.append((rows, ratio))
            numbers, ratios = zip(*self._samples, strict=True)
            fits = np.stack([np.interp(numbers, self._rows, each) for each in self._by_overlap])
            self._best = int(np.square(np.log(fits / ratios)).sum(1).argmin())

    def link_bytes(self) -> NDArray[np.float64]:
        """(num_rows,) bytes that are expected to cross the link."""
        mixture = self.mixture
        num_bytes = mixture.fixed_bytes + mixture.expert_bytes * mixture.chosen_share * self.ratios
        return np.maximum(1.0, num_bytes)

    def seconds(self, parts: NDArray[np.float64]) -> NDArray[np.float64]:
        """(num_rows,) seconds of computing, from those of a fixed part, of one row's experts and of a row."""
        return _parts_of(self._rows, self.ratios) @ parts

    def fitted_parts(
        self, rows: NDArray[np.float64], seconds: NDArray[np.float64], weights: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """(3,) the seconds of each part, by least squares of relative errors of mean (num_samples,) `seconds`.

        The assumed parts, scaled to these seconds, count as well: sweeps may all be of one size.
        """
        assumed = _parts_of(rows, self.at(rows)) * ASSUMED_PARTS
        scale = np.exp(np.average(np.log(seconds / assumed.sum(1)), weights=weights))
        roots = np.sqrt(weights)
        relative = np.concatenate((assumed * (roots * scale / seconds)[:, None], TRUST * np.eye(3)))
        wanted, factors = np.concatenate((roots, np.full(3, TRUST))), np.full(3, -1.0)
        is_used = np.ones(3, bool)
        while factors.min() < 0:  # seconds are not negative: without that part
            factors = np.zeros(3)
            factors[is_used] = np.linalg.lstsq(relative[:, is_used], wanted)[0]
            is_used &= factors > 0
        found: NDArray[np.float64] = factors * scale * ASSUMED_PARTS
        return found


def _parts_of(rows: NDArray[np.float64] | NDArray[np.int64], ratios: NDArray[np.float64]) -> NDArray[np.float64]:
    """(num_rows, 3) how often a sweep of `rows` has each part."""
    return np.stack((np.ones(len(rows)), ratios, rows), axis=1)
