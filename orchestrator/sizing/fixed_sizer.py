"""A sizer for comparisons: trees of a fixed size, whatever sweeps cost and guesses are worth."""

from __future__ import annotations

from bough.protocol.decision import Decision, Mode
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst, TreePlan
from orchestrator.sizing.plans import Proposal, RoundOutcome, RoundPlan, Situation, limited, requested_plan, whole

MIN_SHARE = 4  # limit below which sharing does not shrink a tree


class FixedSizer:
    """Always plans the same size, except for the request's own settings and the sharing of sweeps.

    Sessions at one target share `sweep_nodes` among their trees, less the prompt tokens that a session still needs.
    """

    def __init__(self, size: BestFirst, sweep_nodes: int) -> None:
        self._size, self._sweep_nodes = size, sweep_nodes
        self._plans: dict[str, tuple[RoundPlan, Decision]] = {}
        self._num_rounds: dict[str, int] = {}

    def plan(self, situation: Situation) -> RoundPlan:
        """The configured size with the request's overrides; no tree if nothing is left to guess."""
        speculation, size = situation.speculation, self._size
        plan = requested_plan(situation, size)
        if plan is None:
            share = max(MIN_SHARE, self._sweep_nodes // max(1, situation.target.num_running) - situation.num_context)
            budget = min(size.budget, share)
            narrow = min(size.width, max(MIN_SHARE, budget // 2))  # a larger width would hardly save steps
            growth = BestFirst(budget, speculation.width or narrow, speculation.depth or size.depth)
            plan = limited(TreePlan(growth, speculation.scheme), situation)
        number = self._num_rounds[situation.session_id] = self._num_rounds.get(situation.session_id, 0) + 1
        mode = Mode.FIXED if plan.max_nodes > 1 else Mode.OFF
        decision = Decision(number, mode, budget=plan.tree.growth.budget, num_context=situation.num_context)
        self._plans[situation.session_id] = plan, decision
        return plan

    def propose(self, session_id: str, drafted: Tree, looked_up: Tree) -> Proposal:
        """The best-scoring nodes of both trees, up to the plan's limit; samples stay whole."""
        if session_id not in self._plans:
            return whole(drafted, looked_up)
        plan, decision = self._plans[session_id]
        return whole(drafted, looked_up, decision, plan.max_nodes)

    def observe(self, session_id: str, outcome: RoundOutcome) -> Decision | None:
        """Return the round's record; nothing is learnt. None if it had no plan."""
        if session_id not in self._plans:
            return None
        _, decision = self._plans.pop(session_id)
        decision.settle(len(outcome.tokens), outcome.result, outcome.grown, outcome.timings)
        return decision

    def forget(self, session_id: str) -> None:
        """Drop the state of a session whose request has ended."""
        self._plans.pop(session_id, None)
        self._num_rounds.pop(session_id, None)
