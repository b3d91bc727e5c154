"""Sessions, a draft and a target in simulated time: the real sizer, growers, batching and estimators; no processes.

What takes time is a profile's (`bough.simulation.profile`), what is guessed and what is true a law's. Runs are the same
every time: nothing here depends on the clock or on the order of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from random import Random
from typing import Any

import numpy as np
import simpy

from bough.protocol.cost_curve import CostCurve
from bough.protocol.generation import Speculation
from bough.protocol.messages import GrowResult, RoundTimings, Timings, VerifyResult
from bough.simulation.profile import Factors, Profile, jittered
from bough.sizing.division import SweepTree, divide
from bough.sizing.step_times import StepTimes
from bough.sizing.sweep_times import SweepPrior, SweepTimes
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst, TreePlan
from draft_worker.growth.best_first import BestFirstGrower
from loadtest.regret.calls import NO_TOKENS, Growing, Sample, Verifying
from orchestrator.sizing.plans import Proposal, RoundOutcome, Situation, Sizer, WorkerFacts
from target_worker.scheduler.batch_delay import BatchDelay
from target_worker.scheduler.batching import choose
from target_worker.scheduler.price import TokenPrice
from target_worker.simulated import volume_of

BRANCH = 16  # children of a node, as draft workers have by default
SECOND = 1e9
PRIOR_ERROR = 1.3  # times the true seconds, that a target takes for true before its first sweep
Process = Generator[simpy.Event, Any, Any]


class World:
    """One draft, one target, and sessions that each generate one text after another."""

    def __init__(self, profile: Profile, sizer: Sizer, speculation: Speculation, seed: int) -> None:
        self.env = simpy.Environment()
        self.factors: Callable[[], Factors] = lambda: Factors()
        self._profile, self._sizer, self._speculation = profile, sizer, speculation
        self._random = Random(seed)
        self._growing: list[Growing] = []
        self._calls: list[Verifying] = []
        self._draft_wakes, self._target_wakes = self.env.event(), self.env.event()
        self._step_times = StepTimes(profile.target.max_nodes)
        target = profile.target
        self._sweep_times = SweepTimes(target.row_step, target.max_sweep_rows, _prior(profile))
        self._price = TokenPrice()
        self._batch_delay = BatchDelay(1.0)
        self._num_running = 0
        self.num_tokens = 0  # of all sessions
        self.env.process(self._draft())
        self.env.process(self._target())

    def run(self, samples: list[Sample]) -> dict[str, float]:
        """Seconds that each takes, all at the same time."""
        seconds: dict[str, float] = {}
        sessions = [self.env.process(self._session(sample, seconds)) for sample in samples]
        self.env.run(until=self.env.all_of(sessions))
        return seconds

    def _session(self, sample: Sample, seconds: dict[str, float]) -> Process:
        """Rounds, as `orchestrator.rounds.round` has them."""
        self._num_running += 1
        began, position, end = self.env.now, sample.prompt_tokens, sample.prompt_tokens + sample.num_tokens
        target_held = draft_held = 0
        while position < end:
            round_began = self.env.now
            situation = self._situation(sample, end - position, position - target_held, position - draft_held)
            plan = self._sizer.plan(situation)
            drafted, grown, draft_seconds = Tree.root(0), None, 0.0
            root = int(sample.law.truth(sample.seed, np.array([position]))[0])
            if plan.asks_draft:
                grown = yield from self._grow(sample, root, position, position - draft_held, plan.tree)
                drafted, draft_held = grown.tree, position
                draft_seconds = grown.timings.total_ns / SECOND
            else:
                drafted = Tree.root(root)
            proposal = self._sizer.propose(sample.name, drafted, Tree.root(root))
            result = yield from self._verify(sample, proposal, position, position - target_held)
            chosen = result.verdict.tokens_of(proposal.tree)
            target_held, position = position + len(chosen), position + len(chosen)
            self.num_tokens += len(chosen)
            network = self._network()
            timings = RoundTimings(
                total_ns=round((self.env.now - round_began) * SECOND),
                draft_ns=round(draft_seconds * SECOND),
                network_ns=round((2 if grown else 1) * network * SECOND),
                target_ns=result.timings.total_ns,
                queue_ns=result.timings.queue_ns,
            )
            one_way = round(network * SECOND)
            outcome = RoundOutcome(len(proposal.tree), chosen, result, grown, one_way if grown else 0, one_way, timings)
            self._sizer.observe(sample.name, outcome)
        self._sizer.forget(sample.name)
        self._batch_delay.left(sample.name)
        self._num_running -= 1
        seconds[sample.name] = self.env.now - began

    def _situation(self, sample: Sample, num_left: int, num_context: int, num_draft_context: int) -> Situation:
        most = self._profile.target.max_nodes
        return Situation(
            sample.name,
            self._speculation,
            0.0,
            WorkerFacts("target", "target", most, self._sweep_times.curve(), self._num_running),
            WorkerFacts("draft", "draft", most, self._step_times.curve()),
            num_left,
            num_context,
            num_draft_context,
        )

    def _network(self) -> float:
        return self._profile.network.call_seconds(self.factors())

    def _grow(self, sample: Sample, root: int, position: int, num_context: int, plan: TreePlan) -> Process:
        yield self.env.timeout(self._network())
        assert isinstance(plan.growth, BestFirst)
        grower = BestFirstGrower(root, plan.growth, BRANCH, NO_TOKENS)
        growing = Growing(sample.law, sample.seed, position, grower, self.env.event(), self.env.now, num_context)
        self._growing.append(growing)
        if not self._draft_wakes.triggered:
            self._draft_wakes.succeed()
        result: GrowResult = yield growing.done
        return result

    def _draft(self) -> Process:
        """A step at a time, for all trees that grow."""
        profile = self._profile.draft
        while True:
            for growing in [each for each in self._growing if len(each.grower.frontier()) == 0]:
                self._growing.remove(growing)
                total = round((self.env.now - growing.arrived) * SECOND)
                timings = Timings(total, 0, compute_ns=total, num_passes=growing.num_passes)
                growing.done.succeed(GrowResult(growing.grower.finished(), 0, timings, 0, self._step_times.curve()))
            if not self._growing:
                self._draft_wakes = self.env.event()
                yield self._draft_wakes
                continue
            stepping = list(self._growing)
            rows = sum(len(each.grower.frontier()) for each in stepping)
            num_context = sum(each.num_context for each in stepping if each.num_passes == 0 and each.num_context > 8)
            seconds = profile.step_seconds(rows, self.factors()) + profile.prefill_seconds(num_context, self.factors())
            seconds = jittered(seconds, profile.jitter, self._random)
            yield self.env.timeout(seconds)
            if num_context == 0:
                self._step_times.observe(rows, seconds)
            for each in stepping:
                each.step()

    def _verify(self, sample: Sample, proposal: Proposal, position: int, num_context: int) -> Process:
        yield self.env.timeout(self._network())
        tree, may_leave_out, done = proposal.tree, proposal.may_leave_out, self.env.event()
        self._calls.append(Verifying(sample, tree, position, num_context, may_leave_out, done, self.env.now))
        self._batch_delay.arrived(sample.name, self.env.now, "o", self._num_running)
        if not self._target_wakes.triggered:
            self._target_wakes.succeed()
        result: VerifyResult = yield done
        return result

    def _divide(self, calls: list[Verifying], num_context: int) -> None:
        """As `target_worker.scheduler.row_division` has it: sessions that share a sweep share its rows."""
        cost = self._sweep_times.curve()
        if cost is None or len(calls) + (num_context > 0) < 2 or not any(call.may_leave_out for call in calls):
            return
        trees = [SweepTree.of(call.tree, call.may_leave_out) for call in calls]
        most, price = self._profile.target.max_sweep_rows, self._price.price
        for call, nodes in zip(calls, divide(trees, num_context, cost, price, most), strict=True):
            call.kept = nodes

    def _answer(self, call: Verifying, began: float, num_rows: int, num_trees: int) -> None:
        """Ends a call after its sweep."""
        self._calls.remove(call)
        total, queue = self.env.now - call.arrived, began - call.arrived
        timings = Timings(round(total * SECOND), round(queue * SECOND), num_passes=1)
        left_out = tuple(np.setdiff1d(np.arange(len(call.tree)), call.kept).tolist())
        self._batch_delay.answered(call.sample.name, self.env.now, "o")
        verdict, curve = call.verdict(), self._sweep_times.curve()
        call.done.succeed(VerifyResult(verdict, 0, timings, 0, left_out, curve, num_rows, num_trees))
        expected = float(SweepTree.of(call.tree, may_leave_out=True).values[call.kept].sum())
        self._price.answered(len(verdict.accepted_nodes) + 1, expected if len(call.tree) > 1 else 0.0)

    def _target(self) -> Process:
        """A sweep at a time, as `target_worker.scheduler.engine` has them."""
        target = self._profile.target
        while True:
            while True:
                wait = self._batch_delay.seconds(self.env.now, {"o": len(self._calls)}) if self._calls else None
                if wait == 0.0:
                    break
                self._target_wakes = self.env.event()
                yield self._target_wakes if wait is None else self._target_wakes | self.env.timeout(wait)
            knee = max(self._sweep_times.knee, 64)
            for call in self._calls:
                call.kept = np.arange(len(call.tree))
            parts = choose(self._calls, target.max_sweep_rows, knee)
            self._divide([part.job for part in parts if part.has_tree], sum(part.num_context for part in parts))
            for call in self._calls:
                call.num_sweeps_skipped += 1
            began = self.env.now
            rows = sum(part.num_tokens for part in parts)
            factors = self.factors()
            link, compute = target.link_seconds_of(rows) * factors.link, target.compute_seconds(rows) * factors.compute
            factor = jittered(1.0, target.jitter, self._random)
            seconds, waited = factor * target.sweep_seconds(rows, factors), factor * max(0.0, link - compute)
            yield self.env.timeout(seconds)
            self._sweep_times.observe(rows, seconds, waited, round(target.link_seconds_of(rows) * SECOND))
            self._batch_delay.swept(seconds)
            trees = sum(part.has_tree for part in parts)
            for part in parts:
                call = part.job
                call.num_remaining -= part.num_context
                call.num_sweeps_skipped = 0
                if part.has_tree:
                    self._answer(call, began, rows, trees)
            self._price.swept(seconds, self.env.now)


def _prior(profile: Profile) -> SweepPrior:
    """What a target would have reckoned of its sweeps before the first: not quite what it comes to."""
    target = profile.target
    rows = (target.row_step, *(num for num in (8, 64, 256) if target.row_step < num <= target.max_sweep_rows))
    seconds = tuple(max(1e-6, PRIOR_ERROR * target.compute_seconds(num)) for num in rows)
    link = target.link_seconds_of(1)
    curve = CostCurve(rows, seconds, target.row_step)
    return SweepPrior(target.row_step, curve, round(link * SECOND), PRIOR_ERROR * link, volume_of(target))
