"""The sizer: chooses each round's tree for the most tokens per second, or no tree if none pays.

A round makes three calls. `plan` compares all tree sizes with plain decoding, by the gains of past rounds and the
seconds of sweeps and draft steps, and sets the least gain of a draft step. `propose` cuts the grown
tree if the next node is not worth its time. `observe` learns from the verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bough.config.processes import OrchestratorConfig
from bough.protocol.decision import Decision, Mode
from bough.protocol.ids import ScopedId
from bough.trees.tree import Tree
from bough.trees.tree_plan import NO_TREE, BestFirst, TreePlan
from orchestrator.sizing.choice import PredictedSize, SweepLoad, TreeGains, best_size, cut_size
from orchestrator.sizing.pairs import FIRST_BOUND, Pair, PairKey, RoundStats, SessionState, Trust, with_values
from orchestrator.sizing.plans import (
    Proposal,
    RoundOutcome,
    RoundPlan,
    Situation,
    limited,
    requested_plan,
    shared_plan,
    union,
    whole,
)
from orchestrator.sizing.round_times import RoundTimes

MOST_NODES = 1024  # limit of a tree
MAX_PAIRS = 64  # limit; the most recently used are kept
ROOM_TO_GROW = 1.25  # budget relative to the best size, as a tree may turn out better than usual
BETTER_BY = 1.03  # ratio of rates from which drafting is stopped or resumed,
TIMES_IN_A_ROW = 2  # if expected in so many consecutive rounds
PROBE = BestFirst(budget=4, width=2, depth=2)
UNKNOWN = BestFirst(budget=16, width=8, depth=6)  # while the target's sweep times are unknown
LEAST_WIDTH = 4  # least nodes of a step; fewer hardly save time
TINY = 1e-12
CROWDED = 0.8  # share of the price, if the target may cut trees further for sessions in the same sweep


@dataclass(slots=True)
class _Pending:
    """The state of a round between its plan and its verdict."""

    situation: Situation
    plan: RoundPlan
    load: SweepLoad | None  # None if the size was not chosen by the sizer
    best: PredictedSize | None
    decision: Decision
    drafted: Tree | None = None
    values: NDArray[np.float64] | None = None  # acceptance probabilities of the drafted nodes
    grown_values: NDArray[np.float64] | None = None  # and of all guesses, looked-up ones included
    sent_values: NDArray[np.float64] = field(default_factory=lambda: np.ones(1))
    places: NDArray[np.intp] = field(default_factory=lambda: np.zeros(1, np.intp))
    trust: float = 1.0  # accepted over expected guesses of trees like this one

    @property
    def expected_guesses(self) -> float:
        """Guesses expected to be accepted, by the calibrated probability of each."""
        return float(self.sent_values[1:].sum())

    @property
    def expected_tokens(self) -> float:
        """Expected tokens of the round, corrected by the outcomes of such expectations."""
        return 1.0 + self.trust * self.expected_guesses


class TreeSizer:
    """A sizer that learns about every pair of models, every worker and every session while it runs."""

    def __init__(self, default: BestFirst, max_depth: int, sweep_nodes: int = 0) -> None:
        """`default` completes sizes that requests fix in part, and is the least width; `max_depth` limits all trees.

        With `sweep_nodes`, a baseline for comparisons, all trees have the default size at any cost, and sessions
        at one target share this number of nodes.
        """
        self._default, self._max_depth, self._sweep_nodes = default, max_depth, sweep_nodes
        self._pairs = lru_cache(MAX_PAIRS)(lambda _: Pair())  # by key; new ones have learnt nothing
        self._times = RoundTimes()
        self._sessions: dict[ScopedId, SessionState] = {}
        self._pending: dict[ScopedId, _Pending] = {}

    @classmethod
    def of(cls, config: OrchestratorConfig) -> TreeSizer:
        """The sizer for --planner and its sizes."""
        size = BestFirst(config.budget, config.width, config.depth)
        return cls(size, config.max_depth, config.sweep_nodes if config.planner == "fixed" else 0)

    def plan(self, situation: Situation) -> RoundPlan:
        """Plan the size with the most tokens per second, or the one that the request or the operator fixes."""
        session = self._session(situation)
        session.num_rounds += 1
        self._times.note(situation)
        requested = requested_plan(situation, self._default)
        if requested is None and self._sweep_nodes:
            requested = shared_plan(situation, self._default, self._sweep_nodes)
        if requested is not None:
            mode = Mode.FIXED if requested.max_nodes > 1 else Mode.OFF
            pending = self._undecided(situation, session, requested, mode)
        elif (load := self._times.load(situation)) is None:
            size = limited(TreePlan(UNKNOWN), situation)
            pending = self._undecided(situation, session, size, Mode.DRAFT)
        else:
            pending = self._decided(situation, session, load)
        self._pending[situation.session_id] = pending
        return pending.plan

    def propose(self, session_id: ScopedId, drafted: Tree, looked_up: Tree) -> Proposal:
        """Choose the nodes of both trees that pay for their time; samples and trees of a fixed size stay whole."""
        pending, session = self._pending.get(session_id), self._sessions.get(session_id)
        if pending is None or session is None:
            return whole(drafted, looked_up)
        pending.drafted = drafted
        if drafted.draft_probs is not None or self._sweep_nodes:
            return whole(drafted, looked_up, pending.decision, pending.plan.max_nodes)
        values = pending.values = session.pair.acceptance.values(drafted, session.bias)
        both = with_values(drafted, values)
        if len(looked_up) > 1:
            both = union(both, looked_up)
            values = np.exp(both.scores().astype(np.float64))
        order = np.argsort(-values, kind="stable")  # parents precede children, as their values are no less
        most = min(pending.plan.max_nodes, len(order))
        if pending.load is not None and pending.best is not None:
            share = CROWDED if pending.load.num_trees > 1 else 1.0
            most = cut_size(values[order], pending.load, pending.best, share, most)
        kept = order[:most]
        pending.grown_values, pending.sent_values = values, values[kept]
        pending.places = _places(kept, len(both))[: len(drafted)]
        self._expect(session, pending, len(both))
        return Proposal(both.only(kept), pending.load is not None, pending.places)

    def observe(self, session_id: ScopedId, outcome: RoundOutcome) -> Decision | None:
        """Learn a round's times and outcomes; returns the round's record, or None if it had no plan."""
        pending, session = self._pending.pop(session_id, None), self._sessions.get(session_id)
        if pending is None or session is None:
            return None
        if outcome.num_context is not None:
            pending.situation = replace(pending.situation, num_context=outcome.num_context)
            pending.decision.num_context = outcome.num_context
        self._times.observe(pending.situation, outcome)
        pending.sent_values[list(outcome.result.left_out_nodes)] = 0.0
        pending.decision.expected_tokens = pending.expected_tokens
        self._learn_guesses(session, pending, outcome)
        num_steps = outcome.grown.timings.num_passes if outcome.grown is not None else 0
        if outcome.grown is not None and pending.plan.asks_draft:
            if (
                num_steps or len(outcome.grown.tree) > 1
            ):  # without a step or a tree the round does not show what trees cost
                for stats in (session.stats, session.pair.stats):
                    stats.note_steps(num_steps)
            pending.decision.draft_id = pending.situation.draft.worker_id if pending.situation.draft else ""
        decision, result = pending.decision, outcome.result
        decision.settle(outcome.timings, len(outcome.tokens), num_steps, len(result.left_out_nodes), result.num_rows)
        if result.timings.num_passes == 1 and 1.0 <= result.expected_expert_ratio < math.inf:
            decision.expected_expert_ratio = result.expected_expert_ratio
            decision.expert_ratio = result.timings.expert_ratio
        if decision.mode is Mode.PROBE and decision.tokens > decision.plain_rate * decision.seconds.total:
            session.pair.probing.paid()
        return decision

    def forget(self, session_id: ScopedId) -> None:
        """Drop a session's state; the statistics of its pair of models stay."""
        self._sessions.pop(session_id, None)
        self._pending.pop(session_id, None)

    def _session(self, situation: Situation) -> SessionState:
        """The state of a session, created again after a move to other models.

        A round without a draft, such as the last one of an answer, is no such move.
        """
        session = self._sessions.get(situation.session_id)
        if situation.draft is not None:
            draft_identity = situation.draft.identity
        else:
            draft_identity = session.key.draft_identity if session is not None else ""
        scheme, temperature = situation.speculation.scheme, round(situation.temperature, 1)
        key = PairKey(situation.target.identity, draft_identity, scheme, temperature)
        if session is None or session.key != key:
            pair, num_rounds = self._pairs(key), session.num_rounds if session is not None else 0
            session = SessionState(pair, key, RoundStats.after(pair.stats), num_rounds=num_rounds)
            self._sessions[situation.session_id] = session
        return session

    def _undecided(self, situation: Situation, session: SessionState, plan: RoundPlan, mode: Mode) -> _Pending:
        decision = Decision(session.num_rounds, mode, num_context=situation.num_context)
        growth = plan.tree.growth
        decision.budget, decision.depth = growth.budget, growth.depth
        load = None if self._sweep_nodes else self._times.load(situation)
        if load is not None:
            self._times.expect(decision.expected, situation, load, session.stats if plan.asks_draft else None)
        return _Pending(situation, plan, None, None, decision)

    def _decided(self, situation: Situation, session: SessionState, load: SweepLoad) -> _Pending:
        """Compare drafting with plain decoding, and set the price."""
        most = min(MOST_NODES, situation.target.max_nodes)
        sizes = np.arange(1, 2 + min(situation.lookup, most - 1))
        plain = best_size(session.stats.looked_up, load, 0.0, sizes, session.pair.lookup_trust.factor)
        best, mode, growth = plain, Mode.LOOKUP, PROBE
        drafting = plain
        if situation.draft is not None and (most_drafted := min(most, situation.draft.max_nodes)) > 1:
            seconds = self._times.draft_seconds(situation, session.stats)
            trust = session.pair.trust.factor
            drafting = best_size(session.stats.drafted, load, seconds, np.arange(2, most_drafted + 1), trust)
            drafted = self._growth(situation, session, load, drafting)
            if self._weigh(session, drafting, plain) and drafted.min_gain <= FIRST_BOUND:
                best, mode, growth = drafting, Mode.DRAFT, drafted
            elif session.pair.probing.is_due():
                mode = Mode.PROBE
        plan, decision = _plan_of(situation, session.num_rounds, mode, growth)
        decision.draft_rate, decision.plain_rate = drafting.rate, plain.rate
        decision.best_nodes, decision.price = best.num_nodes, best.price
        self._times.expect(decision.expected, situation, load, session.stats if plan.asks_draft else None)
        return _Pending(situation, plan, load, best, decision)

    def _weigh(self, session: SessionState, drafting: PredictedSize, plain: PredictedSize) -> bool:
        """Whether to draft; it changes after TIMES_IN_A_ROW rounds in which the opposite was better by BETTER_BY."""
        stats = session.stats
        now, other = (drafting, plain) if stats.is_drafting else (plain, drafting)
        stats.num_contrary = stats.num_contrary + 1 if other.rate > BETTER_BY * now.rate else 0
        if stats.num_contrary >= TIMES_IN_A_ROW:
            stats.is_drafting, stats.num_contrary = not stats.is_drafting, 0
            if not stats.is_drafting:
                session.pair.probing.begin()
            session.pair.stats.is_drafting = stats.is_drafting
        return stats.is_drafting

    def _growth(self, situation: Situation, session: SessionState, load: SweepLoad, best: PredictedSize) -> BestFirst:
        """Limits for growing the best size and a little more; the least gain limits the depth.

        A step must pay for its own seconds and for those of a node: one that it adds, or one that it replaces.
        """
        speculation = situation.speculation
        budget = min(MOST_NODES, math.ceil(ROOM_TO_GROW * best.num_nodes))
        width = speculation.width or min(max(self._default.width, budget // 8), max(LEAST_WIDTH, budget // 2))
        free_seconds = self._times.free_seconds(situation)
        min_gain, depth = 0.0, self._max_depth
        if not free_seconds:
            without, with_node = load.seconds_beside(best.num_nodes - np.array([1, 0]), best.num_nodes)
            seconds = self._times.step_seconds(situation) + float(with_node - without)
            min_gain = session.pair.margin.min_gain(best.rate * seconds)
            depth = depth if min_gain else UNKNOWN.depth
        return BestFirst(budget, width, speculation.depth or depth, min_gain=min_gain, seconds=free_seconds)

    def _expect(self, session: SessionState, pending: _Pending, num_grown: int) -> None:
        decision, num_sent = pending.decision, len(pending.sent_values)
        decision.num_grown, decision.num_sent = num_grown, num_sent
        pending.trust = _trust(session, pending).ratio
        decision.expected_tokens = pending.expected_tokens
        load = pending.load or self._times.load(pending.situation)
        if load is not None:
            beside = self._times.beside_sweep(pending.situation)
            decision.expected.sweep = load.expected_sweep(num_sent) + beside
            decision.plain_sweep = load.expected_sweep(1) + beside

    def _learn_guesses(self, session: SessionState, pending: _Pending, outcome: RoundOutcome) -> None:
        drafted, before, values = pending.drafted, pending.values, pending.grown_values
        if drafted is None or before is None or values is None:
            return
        if len(pending.sent_values) > 1:
            _trust(session, pending).observe(pending.expected_guesses, len(outcome.tokens) - 1)
        if len(drafted) > 1:
            is_verified = pending.places >= 0
            if outcome.result.left_out_nodes:
                is_verified &= ~np.isin(pending.places, outcome.result.left_out_nodes)
            pair = session.pair
            pair.acceptance.observe(drafted, drafted.along(outcome.tokens), is_verified, session.bias)
            # Values are computed with the updated model; otherwise a first surprise would bias the profile for long.
            drafted_values = pair.acceptance.values(drafted, session.bias)
            values = values * _change(before, drafted_values, len(values))
            pair.margin.observe(pair.acceptance.view(drafted), drafted_values)
        if pending.plan.asks_draft and outcome.grown is None:
            return  # a failed draft says nothing about the value of trees
        gains = TreeGains.of(values)
        for stats in (session.stats, session.pair.stats):
            profile = stats.drafted if pending.plan.asks_draft else stats.looked_up
            profile.observe(gains)


def _trust(session: SessionState, pending: _Pending) -> Trust:
    """The trust in trees such as the pending one."""
    has_drafted = pending.drafted is not None and len(pending.drafted) > 1
    return session.pair.trust if has_drafted else session.pair.lookup_trust


def _plan_of(situation: Situation, number: int, mode: Mode, growth: BestFirst) -> tuple[RoundPlan, Decision]:
    decision = Decision(number, mode, num_context=situation.num_context)
    if mode is Mode.LOOKUP:
        plan = limited(NO_TREE, situation, situation.lookup)
    else:
        decision.min_gain = growth.min_gain
        plan = limited(TreePlan(growth), situation)
        if isinstance(plan.tree.growth, BestFirst):
            decision.width = plan.tree.growth.width
    decision.budget, decision.depth = plan.tree.growth.budget, plan.tree.growth.depth
    return plan, decision


def _change(before: NDArray[np.float64], after: NDArray[np.float64], num_nodes: int) -> NDArray[np.float64]:
    """Ratios (num_nodes,) of new to old values of drafted nodes; 1 for looked-up nodes, which come last."""
    change = np.ones(num_nodes)
    change[: len(before)] = after / np.maximum(before, TINY)
    return change


def _places(kept: NDArray[np.intp], num_nodes: int) -> NDArray[np.intp]:
    """Positions (num_nodes,) of nodes in `kept`; -1 for nodes that are not kept."""
    places = np.full(num_nodes, -1, np.intp)
    places[kept] = np.arange(len(kept))
    return places
