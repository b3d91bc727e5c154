"""Simulated rounds for tests of sizers, without processes, clocks or models.

The draft gives the children of every node the probabilities `claimed`; the target accepts the child of rank r with
probability `true[r]`, and otherwise chooses a token that no draft guesses. Seconds come from two cost curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bough.protocol.cost_curve import CostCurve
from bough.protocol.decision import Decision, RoundTimings
from bough.protocol.generation import Speculation
from bough.protocol.ids import ScopedId
from bough.protocol.messages import GrowResult, Timings, VerifyResult
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst, TreePlan
from draft_worker.growth.grower import BestFirstGrower, Candidates
from orchestrator.sizing.plans import Proposal, RoundOutcome, RoundPlan, Situation, Sizer, WorkerFacts
from orchestrator.sizing.totals import DecisionLog
from orchestrator.sizing.tree_sizer import TreeSizer
from target_worker.verification.verify import walk

ROOT, UNGUESSED = 500, 999
SECOND = 1_000_000_000
GOOD = (0.7, 0.1, 0.05, 0.03, 0.02, 0.01)
WRONG = (0.0,) * 6
FLAT = CostCurve((1, 64, 65, 1025), (1.0, 1.0, 1.01, 10.61))  # seconds of a sweep: level up to 64 rows
STEEP = CostCurve((1, 257), (0.1, 2.66))  # weights that are resident: every row costs
STEP = CostCurve((1, 65), (0.01, 0.0164))
DEFAULT = BestFirst(64, 16, 7)


@dataclass(frozen=True, slots=True)
class Played:
    """A played round, from its plan to its outcome."""

    plan: RoundPlan
    drafted: Tree
    proposal: Proposal
    outcome: RoundOutcome
    decision: Decision | None  # as the sizer recorded it

    @property
    def num_nodes(self) -> int:
        return len(self.proposal.tree)


def new_sizer() -> TreeSizer:
    """A sizer with the orchestrator's defaults."""
    return TreeSizer(DEFAULT, max_depth=24)


def situation(**changes: Any) -> Situation:
    """The situation of a session with one target, one draft, known cost curves and 1000 tokens left, with `changes`."""
    facts = Situation(
        ScopedId("s"), Speculation(), 0.0, WorkerFacts("target", "target", 1024, FLAT),
        WorkerFacts("draft", "draft", 1024, STEP), 1000,
    )  # fmt: skip
    return replace(facts, **changes)


@dataclass(slots=True)
class MadeRounds:
    """Plays rounds of one session; fields may be changed between rounds."""

    sizer: Sizer = field(default_factory=new_sizer)
    sweep: CostCurve = FLAT
    step: CostCurve = STEP
    claimed: Sequence[float] = GOOD
    true: Sequence[float] = GOOD
    seed: int = 0
    noise: float = 0.0  # standard deviation of the logarithm of a sweep's seconds
    network: float = 0.0  # seconds of a call
    queue: float = 0.0  # seconds that a call waits at the target
    other_rows: int = 0
    other_trees: int = 0
    draft_fails: bool = False
    base: Situation = field(default_factory=situation)
    log: DecisionLog = field(default_factory=DecisionLog)
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        target, draft = self.base.target, self.base.draft
        self.base = replace(
            self.base,
            target=replace(target, cost=self.sweep),
            draft=replace(draft, cost=self.step) if draft is not None else None,
        )

    def play(self, num_rounds: int = 1, **changes: Any) -> list[Played]:
        """Play `num_rounds` rounds, each in the base situation with `changes`."""
        return [self.round(replace(self.base, **changes)) for _ in range(num_rounds)]

    def round(
        self, facts: Situation, tree: Tree | None = None, left_out: Sequence[int] = (), looked_up: Tree | None = None
    ) -> Played:
        """Play a round; the draft answers with `tree` if it is given. The target leaves out the nodes `left_out`."""
        plan = self.sizer.plan(facts)
        grown = self.grown(plan.tree, tree) if plan.asks_draft and not self.draft_fails else None
        drafted = grown.tree if grown is not None else Tree.root(ROOT)
        proposal = self.sizer.propose(facts.session_id, drafted, looked_up or Tree.root(ROOT))
        outcome = self.outcome(facts, proposal, grown, tuple(left_out))
        decision = self.sizer.observe(facts.session_id, outcome)
        if decision is not None:
            self.log.add(facts.session_id, decision)
        return Played(plan, drafted, proposal, outcome, decision)

    def grown(self, plan: TreePlan, tree: Tree | None = None) -> GrowResult:
        """The draft's answer: the tree that the plan asks for, or `tree`, as if grown in one step."""
        num_passes, seconds = 1, self.step(1)
        if tree is None:
            assert isinstance(plan.growth, BestFirst)
            grower = BestFirstGrower(ROOT, plan.growth, len(self.claimed), np.zeros(0, np.int32))
            num_passes, seconds = 0, 0.0
            while len(frontier := grower.frontier()):
                tokens = np.tile(np.arange(len(self.claimed), dtype=np.int32), (len(frontier), 1))
                log_probs = np.tile(np.log(np.array(self.claimed, np.float32)), (len(frontier), 1))
                grower.take(frontier, Candidates(tokens, log_probs))
                num_passes, seconds = num_passes + 1, seconds + self.step(len(frontier))
            tree = grower.finished()
        total = round(seconds * SECOND)
        return GrowResult(tree, 0, Timings(total, 0, compute_ns=total, num_passes=num_passes), 0, self.step)

    def outcome(
        self, facts: Situation, proposal: Proposal, grown: GrowResult | None, left_out: tuple[int, ...] = ()
    ) -> RoundOutcome:
        """The target's answer and its seconds."""
        ranks = [*range(len(self.true)), UNGUESSED]
        text = self.rng.choice(ranks, 64, p=[*self.true, 1 - sum(self.true)]).tolist()
        kept = np.setdiff1d(np.arange(len(proposal.tree)), left_out)
        verdict = walk(proposal.tree.only(kept), lambda path: text[len(path)])
        verdict = verdict._replace(accepted_nodes=tuple(kept[list(verdict.accepted_nodes)].tolist()))
        rows = len(kept) + facts.num_context + self.other_rows
        sweep = self.sweep(rows) * float(np.exp(self.noise * self.rng.standard_normal()))
        queue, network = round(self.queue * SECOND), round(self.network * SECOND)
        target_ns, draft_ns = round(sweep * SECOND) + queue, grown.timings.total_ns if grown is not None else 0
        network_ns = network * (2 if grown is not None else 1)
        timings = RoundTimings(draft_ns + network_ns + target_ns, draft_ns, network_ns, target_ns, queue)
        of_target = Timings(target_ns, queue, compute_ns=target_ns - queue, num_passes=1)
        num_trees = 1 + self.other_trees
        result = VerifyResult(verdict, 0, of_target, 0, left_out, self.sweep, rows, num_trees)
        chosen = verdict.tokens_of(proposal.tree)
        return RoundOutcome(len(proposal.tree), chosen, result, grown, network, network, timings)


def mean_nodes(rounds: Sequence[Played]) -> float:
    """Mean number of nodes of the sent trees."""
    return sum(played.num_nodes for played in rounds) / len(rounds)


def seconds_per_token(rounds: Sequence[Played]) -> float:
    """Mean seconds per token over all rounds."""
    seconds = sum(played.outcome.timings.total_ns for played in rounds) / SECOND
    return seconds / sum(len(played.outcome.tokens) for played in rounds)
