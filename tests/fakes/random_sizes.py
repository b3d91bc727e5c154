"""A sizer and a target that decide at random; tokens must not depend on sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from bough.protocol.cost_curve import CostCurve
from bough.protocol.decision import Decision, DraftCalibration
from bough.protocol.ids import ScopedId
from bough.protocol.messages import VerifyCall, VerifyResult
from bough.trees.tree import Tree
from bough.trees.tree_plan import NO_TREE, BestFirst, TreePlan
from orchestrator.serving.requests import Requests
from orchestrator.sizing.plans import (
    Proposal,
    RoundOutcome,
    RoundPlan,
    Situation,
    limited,
    merged,
    requested_plan,
    union,
)
from target_worker.scheduler.batching import Part
from target_worker.scheduler.job import VerifyJob
from target_worker.scheduler.row_division import Yield, may_leave_out
from tests.fakes.fleet import FakeTarget

LARGEST = BestFirst(32, 16, 8)


def random_part(tree: Tree, most: int, rng: Random) -> NDArray[np.intp]:
    """Ascending nodes of a random subtree with the root and at most `most` nodes; all sizes are equally likely."""
    kept, parents = {0}, tree.parents.tolist()
    for _ in range(rng.randint(0, min(most, len(tree)) - 1)):
        kept.add(rng.choice([node for node in range(1, len(tree)) if node not in kept and parents[node] in kept]))
    return np.array(sorted(kept), np.intp)


class RandomSizer:
    """A Sizer that plans random sizes, prices, depths and cuts within the protocol's limits; it learns nothing."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._plans: dict[ScopedId, RoundPlan] = {}
        self.sizes: set[int] = set()  # of the proposed trees
        self.num_cut = 0  # rounds that proposed only a part of the grown tree
        self.num_left_out = 0  # nodes that targets left out

    def plan(self, situation: Situation) -> RoundPlan:
        """The plan that the request prescribes, or else a random one."""
        self._plans[situation.session_id] = plan = requested_plan(situation, LARGEST) or self._random_plan(situation)
        return plan

    def propose(self, session_id: ScopedId, drafted: Tree, looked_up: Tree) -> Proposal:
        """A random part of the union of both trees; sampled trees stay whole."""
        plan, rng = self._plans[session_id], self._rng
        if drafted.draft_probs is not None:
            tree = merged(drafted, looked_up, plan.max_nodes) if len(looked_up) > 1 else drafted
            return Proposal(tree, False, np.arange(len(drafted)))
        both = union(drafted, looked_up)
        kept = random_part(both, plan.max_nodes, rng)
        self.sizes.add(len(kept))
        self.num_cut += len(kept) < len(both)
        places = np.full(len(both), -1, np.intp)
        places[kept] = np.arange(len(kept))
        return Proposal(both.only(kept), rng.random() < 0.7, places[: len(drafted)])

    def observe(self, session_id: ScopedId, outcome: RoundOutcome) -> None:
        """Count the nodes that the target left out."""
        self.num_left_out += len(outcome.result.left_out_nodes)

    def forget(self, session_id: ScopedId) -> None:
        """Remove the session's plan."""
        self._plans.pop(session_id, None)

    def decisions(self, session_id: ScopedId) -> Sequence[Decision]:
        """None: nothing is recorded."""
        return ()

    def calibrations(self) -> tuple[DraftCalibration, ...]:
        """None: nothing is predicted."""
        return ()

    def _random_plan(self, situation: Situation) -> RoundPlan:
        rng = self._rng
        lookup = rng.randint(0, situation.lookup)
        if rng.random() < 0.2:
            return replace(limited(NO_TREE, situation, lookup), max_nodes=rng.randint(1, 1 + lookup))
        growth = BestFirst(
            rng.randint(1, LARGEST.budget),
            rng.randint(1, LARGEST.width),
            rng.randint(1, LARGEST.depth),
            min_gain=rng.choice((0.0, 0.0, 0.1, 0.7, 1.5)),
        )
        plan = limited(TreePlan(growth), situation)
        return replace(plan, max_nodes=rng.randint(1, plan.max_nodes), lookup=min(lookup, plan.lookup))


def use_random_sizes(requests: Requests, seed: int) -> RandomSizer:
    """Replace an orchestrator's sizer by a RandomSizer."""
    sizer = RandomSizer(seed)
    requests.sizer = requests.rounds.sizer = sizer
    return sizer


class RandomDivision:
    """Replaces `target_worker.scheduler.engine.share_rows`: leaves out random nodes, even of a lone tree."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)

    def __call__(self, parts: Sequence[Part[VerifyJob]], cost: CostCurve | None, recent: Yield, most_rows: int) -> None:
        for job in (part.job for part in parts if part.has_tree and may_leave_out(part.job)):
            nodes = random_part(job.tree, len(job.tree), self._rng)
            job.keep(nodes if len(nodes) < len(job.tree) else None)


class RandomlyDividingTarget(FakeTarget):
    """A FakeTarget that leaves out random nodes where it may; a repeated call gets the same answer."""

    rng = Random(0)

    def _verify(self, call: VerifyCall) -> VerifyResult:
        key = (call.context.session_id, call.epoch, call.round)
        if not call.may_leave_out or key in self.answers:
            return super()._verify(call)
        kept = random_part(call.tree, len(call.tree), self.rng)
        result = super()._verify(replace(call, tree=call.tree.only(kept)))
        accepted = tuple(kept[list(result.verdict.accepted_nodes)].tolist())
        left_out = tuple(np.setdiff1d(np.arange(len(call.tree)), kept).tolist())
        result = replace(result, verdict=result.verdict._replace(accepted_nodes=accepted), left_out_nodes=left_out)
        self.answers[key] = result
        return result
