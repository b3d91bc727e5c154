"""How long a sweep takes, from those that were: the link's time, or the products' where those take longer."""

from __future__ import annotations

import math

from bough.row_counts import RowCounts
from target_worker.sweep_figures import SweepFigures

WEIGHT = 0.5  # of the last sweep
NANO = 1e-9


class Pace:
    """Learns from every sweep; knows nothing before the first, and then takes none for longer than another."""

    def __init__(self, rows: RowCounts) -> None:
        """Products take their time by rows, padding included."""
        self._rows = rows
        self._link_seconds = 0.0
        self._ideal_seconds = 0.0  # of the link, had it been as fast as ever
        self._row_seconds = 0.0
        self._is_new = True

    def observe(self, num_tokens: int, figures: SweepFigures) -> None:
        """After a sweep."""
        weight = 1.0 if self._is_new else WEIGHT
        self._is_new = False
        row_seconds = (figures.total_ns - figures.wait_ns) * NANO / self._rows.padded(num_tokens)
        self._link_seconds += weight * (figures.link_ns * NANO - self._link_seconds)
        self._ideal_seconds += weight * (figures.link_ideal_ns * NANO - self._ideal_seconds)
        self._row_seconds += weight * (row_seconds - self._row_seconds)

    def seconds(self, num_tokens: int) -> float:
        """Of a sweep of so many tokens."""
        return max(self._link_seconds, self._rows.padded(num_tokens) * self._row_seconds)

    @property
    def knee(self) -> float:
        """Tokens whose products take as long as the link does at its best; infinite where nothing has crossed a link.

        The link's own time would not do: where products take long it is spread over all of theirs.
        """
        return self._ideal_seconds / self._row_seconds if self._ideal_seconds and self._row_seconds else math.inf
