"""Totals and a log of all rounds: sizes, predictions, acceptance, and the sizer's own time."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from bough.protocol.decision import Decision, DraftCalibration, Mode
from bough.protocol.ids import ScopedId
from bough.trees.acceptance import FloatArray
from bough.trees.scheme_acceptance import DepthCounts, SchemeAcceptance
from bough.trees.tree import Tree
from bough.trees.tree_plan import Scheme
from orchestrator.sizing.plans import Proposal, RoundOutcome, RoundPlan, Situation, Sizer

NODE_BOUNDS = tuple(float(2**power) for power in range(11))
SECOND_BOUNDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)
MAX_POSITIONS = 64  # limit; deeper accepted tokens count with the last
MAX_ROUNDS = 256  # limit for each session
MAX_SESSIONS = 64  # limit; the most recently active are kept
MAX_DRAFTS = 64  # limit of draft workers
HALF_LIFE_ROUNDS = 512  # weighs the last few thousand nodes: the first rank is then known to about 0.01
DECAY = 0.5 ** (1 / HALF_LIFE_ROUNDS)
NUM_DEPTHS, NUM_RANKS = 64, 64  # limits of the table; deeper nodes count with the last depth


class AcceptanceCounter:
    """Acceptance counts of all sessions together by scheme, depth and rank among siblings; older rounds weigh less.

    Operators can adapt shapes to the workload with them.
    """

    def __init__(self, half_life_rounds: float = HALF_LIFE_ROUNDS) -> None:
        self._decay = 0.5 ** (1 / half_life_rounds)
        self._counts: dict[Scheme, FloatArray] = {}  # (2, NUM_DEPTHS, NUM_RANKS): accepted, rejected
        self._num_rounds: dict[Scheme, int] = {}

    def observe(self, scheme: Scheme, tree: Tree, accepted_nodes: Sequence[int]) -> None:
        """Count the children of the root and of every accepted node of a verdict."""
        if len(tree) == 1:
            return
        counts = self._counts.setdefault(scheme, np.zeros((2, NUM_DEPTHS, NUM_RANKS)))
        counts *= self._decay
        self._num_rounds[scheme] = self._num_rounds.get(scheme, 0) + 1
        for depth, (node, taken) in enumerate(zip_longest((0, *accepted_nodes), accepted_nodes)):
            children = tree.sampled_children(node, scheme)[:NUM_RANKS]
            if len(children):
                # Empty if all children were rejected, or the accepted one is beyond the table.
                ranks = np.flatnonzero(children == taken)
                outcome = (0, ranks[0]) if len(ranks) else (1, len(children) - 1)
                counts[outcome[0], min(depth, NUM_DEPTHS - 1), outcome[1]] += 1

    def counts(self) -> tuple[SchemeAcceptance, ...]:
        """Counts of every scheme in use, up to the largest counted depth and rank."""
        return tuple(
            SchemeAcceptance(scheme, self._num_rounds[scheme], _by_depth(counts))
            for scheme, counts in self._counts.items()
            if counts.any()
        )


def _by_depth(counts: FloatArray) -> tuple[DepthCounts, ...]:
    _, depths, ranks = np.nonzero(counts)
    accepted, rejected = counts[:, : depths.max() + 1, : ranks.max() + 1].tolist()
    return tuple(DepthCounts(tuple(a), tuple(r)) for a, r in zip(accepted, rejected, strict=True))


class DecisionLog:
    """Bounded log: the least recently used sessions, rounds and workers are dropped."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[ScopedId, deque[Decision]] = OrderedDict()
        # By draft worker: rounds, and decayed sums over them (5,): weight, then what a DraftCalibration has means of.
        self._drafts: OrderedDict[str, tuple[int, NDArray[np.float64]]] = OrderedDict()

    def add(self, session_id: ScopedId, decision: Decision) -> None:
        """Log a round. It counts as a prediction if a draft was asked and a sweep was predicted."""
        log = self._sessions.setdefault(session_id, deque(maxlen=MAX_ROUNDS))
        log.append(decision)
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        if decision.draft_id and decision.num_grown > 1 and decision.expected.sweep:
            num_rounds, sums = self._drafts.pop(decision.draft_id, (0, np.zeros(5)))
            tokens, seconds = (decision.expected_tokens, decision.tokens), (decision.expected, decision.seconds)
            sums = DECAY * sums + (1.0, *tokens, *(each.total for each in seconds))
            self._drafts[decision.draft_id] = num_rounds + 1, sums
            if len(self._drafts) > MAX_DRAFTS:
                self._drafts.popitem(last=False)

    def of(self, session_id: ScopedId) -> Sequence[Decision]:
        """Decisions of a session, oldest first; without a name, of the tenant's session that was active last."""
        if not session_id:
            of_tenant = (known for known in reversed(self._sessions) if known.tenant == session_id.tenant)
            session_id = next(of_tenant, session_id)
        return tuple(self._sessions.get(session_id, ()))

    def calibrations(self) -> tuple[DraftCalibration, ...]:
        """Accuracy of predictions by draft worker."""
        return tuple(
            DraftCalibration(draft_id, num_rounds, *(sums[1:] / sums[0]).tolist())
            for draft_id, (num_rounds, sums) in self._drafts.items()
        )


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
        self._deciding: dict[ScopedId, float] = {}  # the sizer's seconds in the current round, by session
        self.totals, self.log = RoundTotals(), DecisionLog()

    def plan(self, situation: Situation) -> RoundPlan:
        self._deciding[situation.session_id] = 0.0
        with self._timed(situation.session_id):
            return self._sizer.plan(situation)

    def propose(self, session_id: ScopedId, drafted: Tree, looked_up: Tree) -> Proposal:
        with self._timed(session_id):
            return self._sizer.propose(session_id, drafted, looked_up)

    def observe(self, session_id: ScopedId, outcome: RoundOutcome) -> Decision | None:
        with self._timed(session_id):
            decision = self._sizer.observe(session_id, outcome)
        self.totals.plan_seconds.add(self._deciding.pop(session_id))
        if decision is not None:
            self.totals.add(decision)
            self.log.add(session_id, decision)
        return decision

    def forget(self, session_id: ScopedId) -> None:
        self._deciding.pop(session_id, None)
        self._sizer.forget(session_id)

    @contextmanager
    def _timed(self, session_id: ScopedId) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._deciding[session_id] = self._deciding.get(session_id, 0.0) + time.perf_counter() - began
