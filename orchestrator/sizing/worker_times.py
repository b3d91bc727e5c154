"""Times of rounds by worker: the workers' own cost curves, and the overheads measured by the orchestrator."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from dataclasses import dataclass, field

from bough.errors import InvalidCurve
from bough.protocol.cost_curve import CostCurve

logger = logging.getLogger(__name__)

NANO = 1e-9
NUM_RECENT = 7  # samples of a median, which follows a change after four


class RecentMedian:
    """The median of the last NUM_RECENT samples, which is robust against outliers."""

    def __init__(self, default: float) -> None:
        self.median = default  # before the first sample
        self._values: deque[float] = deque(maxlen=NUM_RECENT)

    @property
    def is_known(self) -> bool:
        """Whether there is a sample."""
        return bool(self._values)

    def add(self, value: float) -> None:
        """Add a sample."""
        self._values.append(value)
        self.median = statistics.median(self._values)


@dataclass(slots=True)
class _ReportedTimes:
    """The cost curve that a worker reports."""

    curve: CostCurve | None = None  # seconds of a sweep, or of a draft step, by rows
    has_warned: bool = False  # whether an invalid curve was logged; every reply may have one

    def update(self, worker_id: str, curve: CostCurve | None) -> None:
        """Replace the curve; None and invalid curves are ignored, the latter with one warning."""
        if curve is None or curve == self.curve:
            return
        try:
            curve.validate("cost")
        except InvalidCurve as exc:
            if not self.has_warned:
                logger.warning("%s: %s; going on with what was known before", worker_id, exc)
            self.has_warned = True
        else:
            self.curve = curve


@dataclass(slots=True)
class TargetTimes(_ReportedTimes):
    """Times of rounds at one target worker, in seconds."""

    network: RecentMedian = field(default_factory=lambda: RecentMedian(0.0))
    queue: RecentMedian = field(default_factory=lambda: RecentMedian(0.0))
    drafting: RecentMedian = field(default_factory=lambda: RecentMedian(0.0))  # before the call, network included
    beside: RecentMedian = field(default_factory=lambda: RecentMedian(0.0))  # in the worker, without queue and sweep
    orchestrator: RecentMedian = field(default_factory=lambda: RecentMedian(0.0))  # of a round, outside calls
    other_rows: RecentMedian = field(default_factory=lambda: RecentMedian(0.0))  # rows of other sessions in a sweep
    other_trees: RecentMedian = field(default_factory=lambda: RecentMedian(0.0))
    foreign: RecentMedian = field(default_factory=lambda: RecentMedian(0.0))  # those of other orchestrators at least

    @property
    def other_rows_known(self) -> int | None:
        """Rows of other sessions to expect in a sweep; None before a round that read no prompt."""
        return round(self.other_rows.median) if self.other_rows.is_known else None


@dataclass(slots=True)
class DraftTimes(_ReportedTimes):
    """Times of trees grown at one draft worker, in seconds."""

    network: RecentMedian = field(default_factory=lambda: RecentMedian(0.0))
    queue: RecentMedian = field(default_factory=lambda: RecentMedian(0.0))
    ratio: RecentMedian = field(default_factory=lambda: RecentMedian(1.0))  # a step's time over the curve's for one row

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of the recent width and load; 0 if unknown."""
        return self.ratio.median * self.curve(1) if self.curve is not None else 0.0
