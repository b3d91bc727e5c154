"""Ratios, paired by repeat, of seconds of the best fixed size in hindsight to seconds self-sized; prediction errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from bough.protocol.decision import Decision

NUM_BOOTSTRAPS = 2000
MOST_CONTEXT = 16  # further rows of a round; one with more has read a prompt


class Score(NamedTuple):
    """The score of a regime."""

    ratio: float  # geometric mean over scored repeats; above 1 if self-sized trees are faster
    low: float  # end of the 95 % bootstrap interval over these repeats
    high: float
    best_fixed: str  # the best size on the other repeats
    best_fixed_seconds: float  # its geometric mean over scored repeats
    plain_ratio: float  # seconds of plain decoding over seconds self-sized, over all repeats


def score(self_sized: Sequence[float], fixed: Mapping[str, Sequence[float]], plain: Sequence[float]) -> Score:
    """Choose the best fixed size on even repeats and score it on odd ones, and the other way round.

    Choosing and scoring on the same repeats would overestimate the best of many sizes (the winner's curse).
    """
    scored: list[float] = []
    logs: list[float] = []
    names = []
    for chosen_on, scored_on in ((0, 1), (1, 0)):
        best = min(fixed, key=lambda name: _mean_log(fixed[name][chosen_on::2]))
        names.append(best)
        scored += fixed[best][scored_on::2]
        pairs = zip(fixed[best][scored_on::2], self_sized[scored_on::2], strict=True)
        logs += [math.log(theirs / ours) for theirs, ours in pairs]
    low, high = interval(logs)
    plain_logs = [math.log(theirs / ours) for theirs, ours in zip(plain, self_sized, strict=True)]
    best = " / ".join(dict.fromkeys(names))
    return Score(math.exp(_mean(logs)), low, high, best, geomean(scored), math.exp(_mean(plain_logs)))


def interval(logs: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The geometric mean's 95 % bootstrap interval, with a fixed seed."""
    rng = Random(seed)
    means = sorted(math.exp(_mean(rng.choices(logs, k=len(logs)))) for _ in range(NUM_BOOTSTRAPS))
    return means[round(0.025 * NUM_BOOTSTRAPS)], means[round(0.975 * NUM_BOOTSTRAPS) - 1]


def geomean(ratios: Sequence[float]) -> float:
    """The geometric mean of positive ratios."""
    return math.exp(_mean([math.log(ratio) for ratio in ratios]))


def _mean_log(seconds: Sequence[float]) -> float:
    return _mean([math.log(each) for each in seconds])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def token_error(decisions: Iterable[Decision]) -> float:
    """Relative error of the tokens predicted for rounds that read no prompt; 0 without predictions."""
    return _error(decisions, lambda d: d.expected_tokens, lambda d: d.tokens)


def round_time_error(decisions: Iterable[Decision]) -> float:
    """Relative error of the seconds predicted for rounds that read no prompt; 0 without predictions."""
    return _error(decisions, lambda d: d.expected.total, lambda d: d.seconds.total)


def _error(
    decisions: Iterable[Decision], expected: Callable[[Decision], float], real: Callable[[Decision], float]
) -> float:
    predicted = [d for d in decisions if d.is_predicted and d.num_context < MOST_CONTEXT]
    total = sum(map(real, predicted))
    return sum(map(expected, predicted)) / total - 1 if total else 0.0


def overall(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The figure farthest from 0 of all of a kind, simulated and real; real planning is not timed."""
    simulated, details = figures.get("simulated", {}), figures.get("real", {}).get("details", {})
    measured = {name: found for name, found in details.items() if "ratio" in found}
    penalties = [1 - found["plain_ratio"] for found in measured.values() if "off" in found["best_fixed"]]
    worst = {"off_penalty": round(max([0.0, simulated.get("off_penalty", 0.0), *penalties]), 4)}
    for error in ("round_time_error", "token_error"):
        errors = [*simulated.get(error, {}).values(), *(found[error] for found in measured.values())]
        worst[error] = max(errors, key=abs, default=0.0)
    return worst | {name: simulated[name] for name in simulated.keys() & {"plan_seconds"}}
