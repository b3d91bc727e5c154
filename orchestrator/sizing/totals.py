"""Totals over all rounds since the start, for `/metrics`: sizes, predictions, and the sizer's own time."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bough.protocol.decision import Decision, Mode
from bough.trees.tree import Tree
from orchestrator.sizing.decision_log import DecisionLog
from orchestrator.sizing.plans import Proposal, RoundOutcome, RoundPlan, Situation, Sizer

NODE_BOUNDS = tuple(float(2**power) for power in range(11))
SECOND_BOUNDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)
MAX_POSITIONS = 64  # limit; deeper accepted tokens count with the last


@dataclass(slots=True)
class Histogram:
    """A histogram: counts by the smallest bound that a value does not exceed; the last count is above all bounds."""

    bounds: tuple[float, ...]  # ascending
    counts: list[int] = field(init=False)
    total: float = 0.0  # sum of the values

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class RoundTotals:
    """Totals of all sessions. Expected and realised values cover only rounds with a prediction."""

    rounds: Counter[Mode] = field(default_factory=Counter)
    num_drafts: int = 0  # rounds that verified more than a root
    num_draft_tokens: int = 0  # verified nodes, roots excluded
    accepted_by_position: list[int] = field(default_factory=lambda: [0] * MAX_POSITIONS)  # from the root's children on
    expected_tokens: float = 0.0
    tokens: int = 0
    expected_seconds: float = 0.0
    seconds: float = 0.0
    nodes: Histogram = field(default_factory=lambda: Histogram(NODE_BOUNDS))  # of trees sent, roots included
    plan_seconds: Histogram = field(default_factory=lambda: Histogram(SECOND_BOUNDS))  # of the sizer, by round

    def add(self, decision: Decision) -> None:
        """Count a round."""
        self.rounds[decision.mode] += 1
        self.nodes.add(decision.num_sent)
        num_verified = decision.num_sent - decision.num_left_out - 1
        self.num_drafts += num_verified > 0
        self.num_draft_tokens += num_verified
        for position in range(decision.tokens - 1):
            self.accepted_by_position[min(position, MAX_POSITIONS - 1)] += 1
        if decision.is_predicted:
            self.expected_tokens += decision.expected_tokens
            self.tokens += decision.tokens
            self.expected_seconds += decision.expected.total
            self.seconds += decision.seconds.total


class MeasuredSizer:
    """Wraps a sizer: sums up and logs its rounds, and measures the time that it takes."""

    def __init__(self, sizer: Sizer) -> None:
        self._sizer = sizer
        self._deciding: dict[str, float] = {}  # the sizer's seconds in the current round, by session
        self.totals, self.log = RoundTotals(), DecisionLog()

    def plan(self, situation: Situation) -> RoundPlan:
        self._deciding[situation.session_id] = 0.0
        with self._timed(situation.session_id):
            return self._sizer.plan(situation)

    def propose(self, session_id: str, drafted: Tree, looked_up: Tree) -> Proposal:
        with self._timed(session_id):
            return self._sizer.propose(session_id, drafted, looked_up)

    def observe(self, session_id: str, outcome: RoundOutcome) -> Decision | None:
        with self._timed(session_id):
            decision = self._sizer.observe(session_id, outcome)
        self.totals.plan_seconds.add(self._deciding.pop(session_id))
        if decision is not None:
            self.totals.add(decision)
            self.log.add(session_id, decision)
        return decision

    def forget(self, session_id: str) -> None:
        self._deciding.pop(session_id, None)
        self._sizer.forget(session_id)

    @contextmanager
    def _timed(self, session_id: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._deciding[session_id] = self._deciding.get(session_id, 0.0) + time.perf_counter() - began
