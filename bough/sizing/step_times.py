"""How long a draft step takes by its rows, learnt from the steps that there are."""

from __future__ import annotations

from bough.protocol.cost_curve import CostCurve
from bough.sizing.row_averages import RowAverages
from bough.sizing.sweep_times import ASSUMED, LEAST_SECONDS, grid, to_curve


class StepTimes:
    """Seconds of a draft step by the rows of all sessions in it, choosing candidates included.

    Steps that also read context are no samples: their rows are no frontier's.
    """

    def __init__(self, most_rows: int) -> None:
        self._rows = grid(1, most_rows)
        self._seconds = RowAverages(ASSUMED, self._rows)
        self._curve: CostCurve | None = None

    def observe(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        if rows < 1 or seconds <= 0:
            return
        self._seconds.observe(rows, max(seconds, LEAST_SECONDS))
        self._curve = None

    def curve(self) -> CostCurve | None:
        """What steps take; None before the first."""
        if self._curve is None and self._seconds.is_known:
            self._curve = to_curve(self._rows, self._seconds.values(), 1)
        return self._curve
