"""Cost curves: seconds of a sweep or draft step by its number of rows."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from bough.errors import InvalidCurve

MAX_KNOTS = 128
MAX_ROWS = 1 << 24
MAX_SECONDS = 1e6
SAME = 1e-9  # relative rounding error by which a flat curve may decrease


@dataclass(frozen=True, slots=True)
class CostCurve:
    """A non-decreasing, piecewise linear function from rows to seconds, extrapolated beyond the last knot.

    Rows are padded to multiples of `step` first.
    """

    rows: tuple[int, ...]  # (num_knots,) ascending, 1 or more
    seconds: tuple[float, ...]  # (num_knots,) above 0
    step: int = 1  # rows are computed in multiples of this

    def validate(self, name: str) -> None:
        """Check every invariant.

        Raises:
            InvalidCurve: names the invalid entry of the curve `name`.
        """
        if not 1 <= len(self.rows) <= MAX_KNOTS or len(self.rows) != len(self.seconds):
            raise InvalidCurve(
                name,
                f"must have 1 to {MAX_KNOTS} rows and as many seconds",
                f"{len(self.rows)} rows and {len(self.seconds)} seconds",
            )
        if not 1 <= self.step <= MAX_ROWS:
            raise InvalidCurve(f"{name}.step", f"must be 1 to {MAX_ROWS}", self.step)
        for index, (rows, seconds) in enumerate(zip(self.rows, self.seconds, strict=True)):
            least = self.rows[index - 1] + 1 if index else 1
            if not least <= rows <= MAX_ROWS:
                raise InvalidCurve(f"{name}.rows[{index}]", f"must be {least} to {MAX_ROWS}, as rows ascend", rows)
            if not 0 < seconds <= MAX_SECONDS or not math.isfinite(seconds):  # also catches NaN
                raise InvalidCurve(f"{name}.seconds[{index}]", f"must be above 0 and at most {MAX_SECONDS:g}", seconds)
            if index and seconds < self.seconds[index - 1] * (1 - SAME):
                raise InvalidCurve(
                    f"{name}.seconds[{index}]",
                    f"must be at least {self.seconds[index - 1]}, as seconds never decrease",
                    seconds,
                )

    def __call__(self, rows: int) -> float:
        """Seconds for this number of rows."""
        return self.unpadded(-(-max(rows, 1) // self.step) * self.step)

    def unpadded(self, rows: float) -> float:
        """Seconds interpolated between the knots, also between multiples of `step`."""
        after = bisect_right(self.rows, rows)
        if after == len(self.rows):
            return self.seconds[-1] + self.last_slope * (rows - self.rows[-1])
        if after == 0:
            return self.seconds[0]
        (left, right), (below, above) = self.rows[after - 1 : after + 1], self.seconds[after - 1 : after + 1]
        return below + (above - below) / (right - left) * (rows - left)

    @property
    def last_slope(self) -> float:
        """Seconds for each row beyond the last knot: the last segment's slope, or the mean if there is one knot."""
        if len(self.rows) == 1:
            return self.seconds[0] / self.rows[0]
        return (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])

    def scaled(self, factor: float) -> CostCurve:
        """The same curve with all seconds multiplied by `factor`."""
        return CostCurve(self.rows, tuple(factor * seconds for seconds in self.seconds), self.step)
