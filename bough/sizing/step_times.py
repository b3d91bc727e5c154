"""Seconds of a draft step by its rows, learnt from past steps."""

from __future__ import annotations

from bough.protocol.cost_curve import CostCurve
from bough.sizing.row_averages import RowAverages
from bough.sizing.sweep_times import ASSUMED, LEAST_SECONDS, grid, to_curve


class StepTimes:
    """Learns the seconds of a draft step, candidate selection included, by the rows of all sessions in it.

    Steps that also compute context must not be observed.
    """

    def __init__(self, most_rows: int) -> None:
        self._rows = grid(1, most_rows)
        self._seconds = RowAverages(ASSUMED, self._rows)
        self._curve: CostCurve | None = None

    def observe(self, rows: int, seconds: float) -> None:
        """Add a step of `rows` rows that took `seconds`."""
        if rows < 1 or seconds <= 0:
            return
        self._seconds.observe(rows, max(seconds, LEAST_SECONDS))
        self._curve = None

    def curve(self) -> CostCurve | None:
        """The cost curve; None before the first step."""
        if self._curve is None and self._seconds.is_known:
            self._curve = to_curve(self._rows, self._seconds.values(), 1)
        return self._curve
