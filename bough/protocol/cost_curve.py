"""Seconds of a sweep, or of a draft step, by its number of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bough.errors import InvalidCurve

MAX_KNOTS = 64
MAX_ROWS = 1 << 24
MAX_SECONDS = 1e6
SAME = 1e-9  # relative; rounding may make a flat curve fall by so much


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds at some numbers of rows, linear between them and beyond the last; rows are padded to multiples of `step`.

    Never falls: more rows never take less time.
    """

    rows: tuple[int, ...]  # ascending, 1 or more
    seconds: tuple[float, ...]  # one for each, above 0
    step: int = 1  # rows are computed in multiples of this

    def validate(self, name: str) -> None:
        """Checks every rule.

        Raises:
            InvalidCurve: naming the entry at fault, with `name` as that of the curve.
        """
        if not 1 <= len(self.rows) <= MAX_KNOTS or len(self.rows) != len(self.seconds):
            raise InvalidCurve(
                f"{name}: {len(self.rows)} rows and {len(self.seconds)} seconds; must be as many of each, "
                f"1 to {MAX_KNOTS}"
            )
        if not 1 <= self.step <= MAX_ROWS:
            raise InvalidCurve(f"{name}.step: {self.step}; must be 1 to {MAX_ROWS}")
        for index, (rows, seconds) in enumerate(zip(self.rows, self.seconds, strict=True)):
            least = self.rows[index - 1] + 1 if index else 1
            if not least <= rows <= MAX_ROWS:
                raise InvalidCurve(f"{name}.rows[{index}]: {rows}; must be {least} to {MAX_ROWS}, for rows ascend")
            if not 0 < seconds <= MAX_SECONDS or not math.isfinite(seconds):  # also catches NaN
                raise InvalidCurve(f"{name}.seconds[{index}]: {seconds}; must be above 0, {MAX_SECONDS:g} at most")
            if index and seconds < self.seconds[index - 1] * (1 - SAME):
                raise InvalidCurve(
                    f"{name}.seconds[{index}]: {seconds}; must be {self.seconds[index - 1]} or more, "
                    "for more rows never take less time"
                )

    def padded(self, rows: ArrayLike) -> NDArray[np.int64]:
        """Rows that are computed for so many."""
        padded: NDArray[np.int64] = -(-np.maximum(rows, 1) // self.step) * self.step
        return padded

    def at(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Seconds for each of these numbers of rows."""
        padded = self.padded(rows)
        inside: NDArray[np.float64] = np.interp(padded, self.rows, self.seconds)
        return inside + self.last_slope * np.maximum(padded - self.rows[-1], 0)

    def __call__(self, rows: int) -> float:
        """Seconds for so many rows."""
        return float(self.at(rows))

    @property
    def last_slope(self) -> float:
        """Seconds of a row beyond the last knot: as from the first knot to the last past the knee.

        Where only one number of rows is known, its seconds are spread over its rows: a sweep is never free.
        """
        if len(self.rows) == 1:
            return self.seconds[0] / self.rows[0]
        return (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])

    def steps(self, most: int) -> NDArray[np.int64]:
        """The numbers of rows up to `most` that pad nothing, and `most` itself: where a size can be best."""
        edges = np.arange(self.step, most + 1, self.step)
        return edges if len(edges) and edges[-1] == most else np.append(edges, most)

    def scaled(self, factor: float) -> CostCurve:
        """The same, everything so many times as long."""
        return CostCurve(self.rows, tuple(factor * seconds for seconds in self.seconds), self.step)
