"""Predicts the time of rounds from workers' cost curves and from measurements of everything else."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from bough.protocol.decision import RoundSeconds
from bough.sizing.choice import SweepLoad
from orchestrator.sizing.pairs import RoundStats
from orchestrator.sizing.plans import RoundOutcome, Situation, WorkerFacts
from orchestrator.sizing.worker_times import NANO, DraftTimes, TargetTimes

HIDDEN_FROM = 0.25  # of a sweep; calls with a longer queueing time wait for another sweep to end
SHARE_OF_WAIT = 0.9  # of that wait, that may be spent drafting
SMALL_CONTEXT = 16  # tokens; a round with more reads a prompt, and its times say little about the next round's
FIRST_STEPS = 4  # of a tree, before any was observed
MAX_WORKERS = 64  # limit of each kind; the most recently used are kept


class StepCost(NamedTuple):
    """The cost of another draft step."""

    free_seconds: float  # drafting time that only fills a wait for another sweep; 0 if drafting delays the round
    step_seconds: float


class RoundTimes:
    """Measurements of all rounds, by worker."""

    def __init__(self) -> None:
        self._targets = lru_cache(MAX_WORKERS)(lambda _: TargetTimes())  # by worker; new ones are empty
        self._drafts = lru_cache(MAX_WORKERS)(lambda _: DraftTimes())

    def note(self, situation: Situation) -> None:
        """Take over the cost curves that workers reported when introduced."""
        target = self._targets(situation.target.worker_id)
        if target.curve is None:
            target.update(situation.target.worker_id, situation.target.cost)
        if situation.draft is not None and (draft := self._drafts(situation.draft.worker_id)).curve is None:
            draft.update(situation.draft.worker_id, situation.draft.cost)

    def load(self, situation: Situation) -> SweepLoad | None:
        """The rest of the next sweep besides the session's tree; None while the target's cost is unknown."""
        times = self._targets(situation.target.worker_id)
        if times.curve is None:
            return None
        num_running = self._num_running(situation)
        others, rows = (round(times.other_trees.median), times.other_rows_known) if num_running > 1 else (0, 0)
        fixed = times.network.median + times.beside.median + times.orchestrator.median
        fixed += times.queue.median if num_running > 1 else 0.0
        if self._is_hidden(situation):
            fixed += times.drafting.median
        return SweepLoad(times.curve, situation.num_context, 1 + min(others, num_running - 1), rows, fixed)

    def draft_seconds(self, situation: Situation, stats: RoundStats) -> float:
        """Seconds by which a draft's tree delays a round."""
        return 0.0 if self._is_hidden(situation) else self._drafting_seconds(situation, stats)

    def step_cost(self, situation: Situation) -> StepCost:
        """Cost of a step of the usual width."""
        draft, target = situation.draft, self._targets(situation.target.worker_id)
        if draft is None:
            return StepCost(0.0, 0.0)
        free = 0.0
        if self._is_hidden(situation):
            free = target.drafting.median + SHARE_OF_WAIT * self._wait(situation)
        return StepCost(free, self._drafts(draft.worker_id).step_seconds)

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

        What its curve says wrongly of sweeps is no part of it: as seconds that no tree can change, it would make trees
        grow where all sweeps have become slower.
        """
        return self._targets(situation.target.worker_id).beside.median

    def observe(self, situation: Situation, outcome: RoundOutcome) -> None:
        """Record a round."""
        self._observe_target(situation, outcome)
        if situation.draft is not None and outcome.grown is not None:
            self._observe_draft(situation, situation.draft, outcome)

    def _observe_target(self, situation: Situation, outcome: RoundOutcome) -> None:
        times, result, timings = self._targets(situation.target.worker_id), outcome.result, outcome.timings
        times.update(situation.target.worker_id, result.cost)
        times.network.add(outcome.target_network_ns * NANO)
        if situation.num_context <= SMALL_CONTEXT:  # a session that begins waits for a sweep that began without it
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
        times.beside.add(max(0, timings.target_ns - timings.queue_ns - sweep_ns) * NANO)

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
        """Whether sessions alternate, so that one drafts while another's tree is verified."""
        return self._wait(situation) > 0.0
