"""What a sizer is asked, what it answers, and what it learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bough.protocol.cost_curve import CostCurve
from bough.protocol.decision import Decision, DraftCalibration
from bough.protocol.generation import Speculation
from bough.protocol.messages import GrowResult, RoundTimings, VerifyResult
from bough.trees.merge import merged
from bough.trees.tree import Tree
from bough.trees.tree_plan import MAX_EXPANSIONS, NO_TREE, BestFirst, TreePlan


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a sizer needs to know of a worker."""

    worker_id: str
    identity: str  # equal for workers whose guesses, or tokens, are the same
    max_nodes: int
    cost: CostCurve | None  # as the worker told when it was met
    num_running: int = 1  # sessions that this orchestrator runs at a target, the one in question included


@dataclass(frozen=True, slots=True)
class Situation:
    """One session before a round."""

    session_id: str
    speculation: Speculation
    temperature: float
    target: WorkerFacts
    draft: WorkerFacts | None  # None where there is none to ask
    num_left: int  # most tokens that may still come
    num_context: int = 0  # tokens before the tree that the target does not hold
    num_draft_context: int = 0  # and that the draft does not
    lookup: int = 0  # most guesses from the session's own text


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """How large a round's tree may be, and how to grow it."""

    tree: TreePlan  # for the draft worker; a budget of 1 asks for nothing
    max_nodes: int  # to send, the root included; samples may not be cut and count as they are
    lookup: int  # most guesses from the session's own text

    @property
    def asks_draft(self) -> bool:
        return self.tree.growth.budget > 1


class Proposal(NamedTuple):
    """The tree that is sent to the target."""

    tree: Tree
    may_leave_out: bool  # the target may cut it further where others share its sweep
    places: NDArray[np.intp]  # (num_drafted,) of the drafted nodes in it; -1 for those that were cut


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What became of a round."""

    num_nodes: int  # of the tree that was sent
    tokens: Sequence[int]  # that the target chose, the bonus token included
    result: VerifyResult
    grown: GrowResult | None  # None where no draft worker answered or was asked
    draft_network_ns: int  # that the call to the draft took beyond the worker's own time
    target_network_ns: int
    timings: RoundTimings


class Sizer(Protocol):
    """The one owner of size: every limit on a tree passes through it."""

    def plan(self, situation: Situation) -> RoundPlan:
        """How to grow the next tree."""
        ...

    def propose(self, session_id: str, drafted: Tree, looked_up: Tree) -> Proposal:
        """Of what has grown, and what was looked up beside it, the part that is worth verifying."""
        ...

    def observe(self, session_id: str, outcome: RoundOutcome) -> Decision | None:
        """The round is over; its record, None where it had no plan."""
        ...

    def forget(self, session_id: str) -> None:
        """The session's request has ended."""
        ...

    def decisions(self, session_id: str) -> Sequence[Decision]:
        """The last rounds of a session, or of the one that was last at work where the name is empty."""
        ...

    def calibrations(self) -> tuple[DraftCalibration, ...]:
        """How well predictions agreed with what came to pass, by draft worker."""
        ...


def whole(drafted: Tree, looked_up: Tree) -> Proposal:
    """All that there is, with nothing decided: for a round of which a sizer knows no plan.

    A stream that another has taken over may end in the middle of the other's round, and have its session forgotten.
    """
    tree = merged(drafted, looked_up, len(drafted)) if len(looked_up) > 1 else drafted
    return Proposal(tree, False, np.arange(len(drafted)))


def requested_plan(situation: Situation, size: BestFirst) -> RoundPlan | None:
    """The plan of a request that leaves nothing to decide; None for one that does.

    `size` is what a request that names only a part of a size gets for the rest.
    """
    speculation = situation.speculation
    if speculation.disabled or situation.num_left <= 1:
        return RoundPlan(NO_TREE, 1, 0)
    if speculation.growth is None and speculation.budget is None:
        return None
    budget = speculation.budget or size.budget
    width = speculation.width or min(size.width, max(4, budget // 2))
    growth = speculation.growth or BestFirst(budget, width, speculation.depth or size.depth)
    return limited(TreePlan(growth, speculation.scheme, speculation.guess), situation)


def limited(plan: TreePlan, situation: Situation) -> RoundPlan:
    """A plan within what both workers take and the request may still use; without a draft only its lookup is left."""
    most = min(plan.growth.budget, situation.target.max_nodes)
    depth = situation.num_left - 1  # what is deeper could not be kept, and may lie beyond the model's positions
    if situation.draft is None:
        return RoundPlan(NO_TREE, most, situation.lookup)
    tree = plan.within(min(most, situation.draft.max_nodes)).no_deeper(depth)
    if isinstance(tree.growth, BestFirst):
        tree = tree.no_deeper(max(1, MAX_EXPANSIONS // min(tree.growth.width, tree.growth.budget)))
    return RoundPlan(tree if tree.growth.budget > 1 else NO_TREE, most, situation.lookup)
