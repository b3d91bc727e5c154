"""What rounds take at each worker: the workers' own curves, and what comes on top as the orchestrator sees it."""

from __future__ import annotations

import logging
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from bough.errors import InvalidCurve
from bough.protocol.cost_curve import CostCurve

logger = logging.getLogger(__name__)

NANO = 1e-9
NUM_RECENT = 7  # of which a median is taken: a change is followed after four
MAX_WORKERS = 64  # that are remembered: they come and go

Times = TypeVar("Times")


class Recent:
    """The median of the last few numbers: one that is far off moves it little."""

    def __init__(self, default: float) -> None:
        self.median = default  # the default before the first
        self._values: deque[float] = deque(maxlen=NUM_RECENT)

    def add(self, value: float) -> None:
        """One more."""
        self._values.append(value)
        self.median = statistics.median(self._values)


@dataclass(slots=True)
class _ToldTimes:
    """What a worker tells of itself."""

    curve: CostCurve | None = None  # seconds of a sweep, or of a draft step, by rows
    has_warned: bool = False  # of a curve that was none: said once, for it comes with every reply

    def told(self, worker_id: str, curve: CostCurve | None) -> None:
        """Takes a curve over; where there is none, or it is no curve, what was known before goes on to hold."""
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
class TargetTimes(_ToldTimes):
    """Of rounds at one target worker."""

    network: Recent = field(default_factory=lambda: Recent(0.0))
    queue: Recent = field(default_factory=lambda: Recent(0.0))
    drafting: Recent = field(default_factory=lambda: Recent(0.0))  # before the call, network included
    beside: Recent = field(default_factory=lambda: Recent(0.0))  # of the worker's own time, beside queue and sweep
    orchestrator: Recent = field(default_factory=lambda: Recent(0.0))  # of a round, beside the calls
    other_rows: Recent = field(default_factory=lambda: Recent(0.0))  # in sweeps, of other sessions
    other_trees: Recent = field(default_factory=lambda: Recent(0.0))


@dataclass(slots=True)
class DraftTimes(_ToldTimes):
    """Of trees grown at one draft worker."""

    network: Recent = field(default_factory=lambda: Recent(0.0))
    queue: Recent = field(default_factory=lambda: Recent(0.0))
    ratio: Recent = field(default_factory=lambda: Recent(1.0))  # of a step, to what the curve says of one row

    @property
    def step_seconds(self) -> float:
        """Of a step as wide, and beside as many other sessions, as steps have been; 0 where nothing is known."""
        return self.ratio.median * self.curve(1) if self.curve is not None else 0.0


class ByWorker(Generic[Times]):
    """Times of the workers that were last used."""

    def __init__(self, make: Callable[[], Times]) -> None:
        self._make = make
        self._times: OrderedDict[str, Times] = OrderedDict()

    def of(self, worker_id: str) -> Times:
        """Those of a worker; of one that is new, none yet."""
        times = self._times.get(worker_id)
        if times is None:
            times = self._times[worker_id] = self._make()
            if len(self._times) > MAX_WORKERS:
                self._times.popitem(last=False)
        self._times.move_to_end(worker_id)
        return times
