"""Measures regret in simulated time: every fixed size, plain decoding and the sizer on the same texts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bough.protocol.decision import Decision
from bough.protocol.generation import Speculation
from bough.protocol.ids import ScopedId
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst
from loadtest.regret.regimes import Regime, regimes
from loadtest.regret.scoring import Score, geomean, round_time_error, score, token_error
from orchestrator.sizing.plans import Proposal, RoundOutcome, RoundPlan, Situation, Sizer
from orchestrator.sizing.tree_sizer import TreeSizer
from simulator.world import World

SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512)
DEPTHS = (1, 2, 4, 6, 9, 14)
NO_SHARING = 1 << 30  # fixed sizes do not shrink with the number of sessions
PLAIN = Speculation(disabled=True)

Answer = TypeVar("Answer")


@dataclass(slots=True)
class TimedSizer:
    """Wraps a sizer and measures its own processor seconds, the only figure here that depends on the machine."""

    sizer: Sizer
    seconds: float = 0.0
    decisions_made: list[Decision] = field(default_factory=list)
    num_rounds: int = 0

    def plan(self, situation: Situation) -> RoundPlan:
        return self._timed(lambda: self.sizer.plan(situation))

    def propose(self, session_id: ScopedId, drafted: Tree, looked_up: Tree) -> Proposal:
        return self._timed(lambda: self.sizer.propose(session_id, drafted, looked_up))

    def observe(self, session_id: ScopedId, outcome: RoundOutcome) -> None:
        self.num_rounds += 1
        if (decision := self._timed(lambda: self.sizer.observe(session_id, outcome))) is not None:
            self.decisions_made.append(decision)

    def forget(self, session_id: ScopedId) -> None:
        self.sizer.forget(session_id)

    def _timed(self, work: Callable[[], Answer]) -> Answer:
        began = time.thread_time()
        try:
            return work()
        finally:
            self.seconds += time.thread_time() - began


@dataclass(frozen=True, slots=True)
class Scale:
    """The amount of work to run."""

    repeats: int
    num_tokens: int  # per session
    more_repeats: int = 0  # of the sizer alone, after the others, to judge its predictions
    sizes: tuple[int, ...] = SIZES
    depths: tuple[int, ...] = DEPTHS


def seconds_of(
    regime: Regime, sizer: Sizer, speculation: Speculation, scale: Scale, repeats: range | None = None
) -> list[float]:
    """Seconds of all sessions of each repeat; the sizer keeps what it learns between repeats."""
    totals = []
    for repeat in repeats or range(scale.repeats):
        world = World(regime.profile, sizer, speculation, repeat)
        num_tokens = scale.num_tokens * len(regime.acceptances)
        world.factors = regime.factors(lambda world=world: world.num_tokens, num_tokens)  # type: ignore[misc]
        totals.append(sum(world.run(regime.samples(repeat, scale.num_tokens)).values()))
    return totals


def fixed_sizes(scale: Scale, most: int) -> dict[str, BestFirst]:
    """The grid of sizes and depths, without depths that exceed the size."""
    return {
        f"{nodes} nodes, depth {depth}": BestFirst(
            nodes, min(16 if nodes <= 128 else nodes // 8, max(1, nodes // 2)), depth
        )
        for nodes in scale.sizes
        for depth in scale.depths
        if depth < nodes <= most
    }


@dataclass(slots=True)
class Result:
    """The result of a regime."""

    regime: Regime
    score: Score
    sizer: TimedSizer
    cold_ratio: float  # seconds of plain decoding over self-sized in the first repeat, before anything is learnt

    @property
    def token_error(self) -> float:
        """Relative error of predicted tokens over a run, without rounds that read a prompt."""
        return token_error(self.sizer.decisions_made)

    @property
    def round_time_error(self) -> float:
        """Relative error of predicted seconds, likewise."""
        return round_time_error(self.sizer.decisions_made)


def measure(regime: Regime, scale: Scale) -> Result:
    """Measure all contestants on one regime."""
    plain = seconds_of(regime, TreeSizer(BestFirst(1, 1, 1), 24, NO_SHARING), PLAIN, scale)
    fixed = {
        name: seconds_of(regime, TreeSizer(size, 24, NO_SHARING), Speculation(), scale)
        for name, size in fixed_sizes(scale, min(regime.profile.target.max_nodes, regime.most_nodes)).items()
    }
    sizer = TimedSizer(TreeSizer(BestFirst(64, 16, 7), max_depth=24))
    self_sized = seconds_of(regime, sizer, Speculation(), scale)
    seconds_of(regime, sizer, Speculation(), scale, range(scale.repeats, scale.repeats + scale.more_repeats))
    return Result(regime, score(self_sized, {"off": plain, **fixed}, plain), sizer, plain[0] / self_sized[0])


def run(scale: Scale, names: Sequence[str] = ()) -> dict[str, Any]:
    """Run all regimes, or those named, and return their figures."""
    results = []
    for regime in regimes():
        if names and regime.name not in names:
            continue
        result = measure(regime, scale)
        results.append(result)
        s = result.score
        errors = f"tokens {result.token_error:+.3f}, seconds {result.round_time_error:+.3f}"
        print(
            f"{regime.name:36} {s.ratio:.3f} ({s.low:.3f}-{s.high:.3f}) of {s.best_fixed}; plain {s.plain_ratio:.3f}, "
            f"first repeat {result.cold_ratio:.3f}; {errors}",
            file=sys.stderr,
            flush=True,
        )
    return summary(results)


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """The figures of the JSON line."""
    if not results:  # those named are real
        return {"regimes": {}}
    ratios = {result.regime.name: round(result.score.ratio, 4) for result in results}
    off = [r.score.plain_ratio for r in results if "off" in r.score.best_fixed]
    rounds = sum(result.sizer.num_rounds for result in results)
    return {
        "geomean": round(geomean(list(ratios.values())), 4),
        "worst": round(min(ratios.values()), 4),
        "regimes": ratios,
        "intervals": {r.regime.name: (round(r.score.low, 4), round(r.score.high, 4)) for r in results},
        "best_fixed": {r.regime.name: r.score.best_fixed for r in results},
        "plain": {r.regime.name: round(r.score.plain_ratio, 4) for r in results},
        "off_penalty": round(1 - min(off), 4) if off else 0.0,
        "token_error": {r.regime.name: round(r.token_error, 4) for r in results},
        "round_time_error": {r.regime.name: round(r.round_time_error, 4) for r in results},
        "rounds": {r.regime.name: r.sizer.num_rounds for r in results},
        "plan_seconds": sum(result.sizer.seconds for result in results) / max(1, rounds),
    }
