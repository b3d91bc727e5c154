"""Predicts the time of rounds from workers' cost curves and from measurements of everything else."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache

from bough.errors import InvalidCurve
from bough.protocol.cost_curve import CostCurve
from bough.protocol.decision import RoundSeconds
from orchestrator.sizing.choice import SweepLoad
from orchestrator.sizing.pairs import RoundStats
from orchestrator.sizing.plans import RoundOutcome, Situation, WorkerFacts

logger = logging.getLogger(__name__)

NANO = 1e-9
NUM_RECENT = 7  # samples of a median, which follows a change after four
HIDDEN_FROM = 0.25  # share of a sweep; a call that queues for longer is waiting for another sweep to end
SHARE_OF_WAIT = 0.9  # share of that wait that may be spent drafting
SMALL_CONTEXT = 16  # tokens; a round with more reads a prompt, and does not predict the next round's times
FIRST_STEPS = 4  # of a tree, before any was observed
MAX_WORKERS = 64  # limit of each kind; the most recently used are kept


class RecentMedian:
    """The median of the last NUM_RECENT samples, which is robust against outliers."""

    def __init__(self, default: float = 0.0) -> None:
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
class WorkerTimes:
    """A worker's cost curve and the measurements of its rounds, in seconds unless stated otherwise."""

    curve: CostCurve | None = None  # seconds of a sweep, or of a draft step, by rows
    has_warned: bool = False  # whether an invalid curve was logged; every reply may have one
    network: RecentMedian = field(default_factory=RecentMedian)
    queue: RecentMedian = field(default_factory=RecentMedian)
    # Of a target:
    drafting: RecentMedian = field(default_factory=RecentMedian)  # before the call, network included
    overhead: RecentMedian = field(default_factory=RecentMedian)  # in the worker, without queue and sweep
    orchestrator: RecentMedian = field(default_factory=RecentMedian)  # of a round, outside calls
    stay_seconds: RecentMedian = field(default_factory=RecentMedian)  # duration for which requests had their slots
    other_rows: RecentMedian = field(default_factory=RecentMedian)  # rows of other sessions in a sweep
    other_trees: RecentMedian = field(default_factory=RecentMedian)
    foreign: RecentMedian = field(default_factory=RecentMedian)  # trees of other orchestrators, at least
    # Of a draft worker:
    ratio: RecentMedian = field(default_factory=lambda: RecentMedian(1.0))  # a step's time over the curve's for one row

    def update(self, worker_id: str, curve: CostCurve | None) -> None:
        """Replace the curve; None and invalid curves are ignored, the latter with one warning."""
        if curve is None or curve == self.curve:
            return
        try:
            curve.validate("cost")
        except InvalidCurve as exc:
            if not self.has_warned:
                logger.warning("%s: %s; continuing with what was known before", worker_id, exc)
            self.has_warned = True
        else:
            self.curve = curve

    @property
    def other_rows_known(self) -> int | None:
        """Rows of other sessions to expect in a sweep; None before a round that read no prompt."""
        return round(self.other_rows.median) if self.other_rows.is_known else None

    @property
    def step_seconds(self) -> float:
        """Seconds of a draft step of the recent width and load; 0 if unknown."""
        return self.ratio.median * self.curve(1) if self.curve is not None else 0.0


class RoundTimes:
    """Measurements of all rounds, by worker."""

    def __init__(self) -> None:
        self._targets = lru_cache(MAX_WORKERS)(lambda _: WorkerTimes())  # by worker; new ones are empty
        self._drafts = lru_cache(MAX_WORKERS)(lambda _: WorkerTimes())

    def note(self, situation: Situation) -> None:
        """Take over the cost curves that workers reported when introduced."""
        target = self._targets(situation.target.worker_id)
        if target.curve is None:
            target.update(situation.target.worker_id, situation.target.cost)
        if situation.draft is not None and (draft := self._drafts(situation.draft.worker_id)).curve is None:
            draft.update(situation.draft.worker_id, situation.draft.cost)

    def load(self, situation: Situation) -> SweepLoad | None:
        """The load of the next sweep except the session's tree; None while the target's cost is unknown."""
        times = self._targets(situation.target.worker_id)
        if times.curve is None:
            return None
        num_running = self._num_running(situation)
        others, rows = (round(times.other_trees.median), times.other_rows_known) if num_running > 1 else (0, 0)
        fixed = times.network.median + times.overhead.median + times.orchestrator.median
        fixed += times.queue.median if num_running > 1 else 0.0
        if self._is_hidden(situation):
            fixed += times.drafting.median
        return SweepLoad(times.curve, situation.num_context, 1 + min(others, num_running - 1), rows, fixed)

    def draft_seconds(self, situation: Situation, stats: RoundStats) -> float:
        """Seconds by which a draft's tree delays a round."""
        return 0.0 if self._is_hidden(situation) else self._drafting_seconds(situation, stats)

    def free_seconds(self, situation: Situation) -> float:
        """Drafting time that only fills a wait for another sweep; 0 if drafting delays the round."""
        if situation.draft is None or not self._is_hidden(situation):
            return 0.0
        return self._targets(situation.target.worker_id).drafting.median + SHARE_OF_WAIT * self._wait(situation)

    def step_seconds(self, situation: Situation) -> float:
        """Seconds of another draft step of the usual width."""
        return self._drafts(situation.draft.worker_id).step_seconds if situation.draft is not None else 0.0

    def expect(self, parts: RoundSeconds, situation: Situation, load: SweepLoad, stats: RoundStats | None) -> None:
        """Fill in the expected parts of a round except its sweep; `stats` is given if a draft is asked."""
        target = self._targets(situation.target.worker_id)
        parts.network, parts.other = target.network.median, target.orchestrator.median
        parts.queue = target.queue.median if self._num_running(situation) > 1 else 0.0
        parts.sweep = load.expected_sweep(1)
        if stats is not None and situation.draft is not None:
            network = self._drafts(situation.draft.worker_id).network.median
            parts.draft = self._drafting_seconds(situation, stats) - network
            parts.network += network

    def beside_sweep(self, situation: Situation) -> float:
        """Seconds of the target's own time outside queue and sweep, as measured.

        Errors of the cost curve are no part of it. Counted as time that no tree can change, they would make trees grow
        whenever all sweeps become slower.
        """
        return self._targets(situation.target.worker_id).overhead.median

    def observe(self, situation: Situation, outcome: RoundOutcome) -> None:
        """Record a round."""
        self._observe_target(situation, outcome)
        if situation.draft is not None and outcome.grown is not None:
            self._observe_draft(situation, situation.draft, outcome)

    def _observe_target(self, situation: Situation, outcome: RoundOutcome) -> None:
        times, result, timings = self._targets(situation.target.worker_id), outcome.result, outcome.timings
        times.update(situation.target.worker_id, result.cost)
        times.network.add(outcome.target_network_ns * NANO)
        if situation.num_context <= SMALL_CONTEXT:  # a new session waits for a sweep that began without it
            times.queue.add(timings.queue_ns * NANO)
            times.drafting.add((timings.draft_ns + outcome.draft_network_ns) * NANO)
        times.orchestrator.add(timings.other_ns * NANO)
        if result.timings.num_passes != 1 or result.num_rows == 0:
            return  # a prompt over several sweeps, or a target that reports no figures
        times.other_trees.add(max(0, result.num_trees - 1))
        times.foreign.add(max(0, result.num_trees - situation.target.num_running))
        if situation.num_context <= SMALL_CONTEXT:  # sessions that begin together read all their prompts in one sweep
            own_rows = outcome.num_nodes - len(result.left_out_nodes) + situation.num_context
            times.other_rows.add(max(0, result.num_rows - own_rows))
        sweep_ns = result.timings.wait_ns + result.timings.compute_ns
        times.overhead.add(max(0, timings.target_ns - timings.queue_ns - sweep_ns) * NANO)

    def _observe_draft(self, situation: Situation, draft: WorkerFacts, outcome: RoundOutcome) -> None:
        times, grown = self._drafts(draft.worker_id), outcome.grown
        assert grown is not None, "seen to by the caller"
        times.update(draft.worker_id, grown.cost)
        times.network.add(outcome.draft_network_ns * NANO)
        times.queue.add(grown.timings.queue_ns * NANO)
        num_passes = grown.timings.num_passes
        if times.curve is not None and num_passes and situation.num_draft_context <= SMALL_CONTEXT:
            times.ratio.add(grown.timings.compute_ns * NANO / num_passes / times.curve(1))

    def _num_running(self, situation: Situation) -> int:
        """Sessions at the target, those of other orchestrators included as far as they have shared sweeps."""
        foreign = self._targets(situation.target.worker_id).foreign.median
        return situation.target.num_running + round(foreign)

    def _drafting_seconds(self, situation: Situation, stats: RoundStats) -> float:
        draft = situation.draft
        if draft is None:
            return 0.0
        times = self._drafts(draft.worker_id)
        steps = FIRST_STEPS if stats.num_steps is None else stats.num_steps
        steps = min(steps, situation.num_remaining - 1)  # no tree is deeper
        return steps * times.step_seconds + times.network.median + times.queue.median

    def _wait(self, situation: Situation) -> float:
        """Seconds that calls wait for another sweep to end; 0 if hardly any."""
        times = self._targets(situation.target.worker_id)
        if times.curve is None or self._num_running(situation) < 2:
            return 0.0
        return max(0.0, times.queue.median - HIDDEN_FROM * times.curve(round(times.other_rows.median) + 1))

    def _is_hidden(self, situation: Situation) -> bool:
        """Whether sessions alternate: one drafts while another's tree is verified."""
        return self._wait(situation) > 0.0
