"""Fits a profile to sessions that ran alone, and predicts what `loadtest.sessions` measured of several at once."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bough.errors import ConfigError
from bough.simulation.acceptance_model import AcceptanceModel
from bough.simulation.profile import DraftProfile, NetworkProfile, Profile, TargetProfile
from bough.simulation.text_model import FIRST_WORD, NUM_WORDS, TextModel
from bough.trees.tree_plan import BestFirst
from loadtest.sessions.rounds_file import RoundRecord, RunRecord, StreamRecord
from simulator.capacity import simulate
from simulator.guesses import expected_tokens
from simulator.scenario import CapacityReport, RequestKind, Scenario, of_size

WAITED = 0.05  # least share of waiting in a sweep from which the link's speed is learnt
SEEDS = (1, 2, 3, 4, 5)
THROUGHPUT_WITHIN, P95_WITHIN = 0.10, 0.20
BISECTIONS = 14
CALLS = 4  # one-way messages in a round with a draft


@dataclass(frozen=True, slots=True)
class Fitted:
    """A profile and sizes fitted to sessions that ran alone."""

    profile: Profile
    kinds: dict[int, RequestKind]  # by prompt number, each with its own acceptance
    size: BestFirst  # the most frequent tree size


def fit(runs: Sequence[RunRecord], prior: Profile) -> Fitted:
    """Fit a profile to the rounds of single sessions; what these do not determine is taken from the prior.

    Raises:
        ConfigError: no session ran alone.
    """
    streams = [each for run in runs if run.num_sessions == 1 for each in run.streams]
    rounds = [each for stream in streams for each in stream.rounds[1:-1]]
    if not rounds:
        raise ConfigError("--sessions: must be a file with rounds of a session alone, got one without")
    nodes = statistics.mode(each.num_nodes for each in rounds)
    size = of_size(nodes, max(1, *(each.depth for each in rounds if each.num_nodes == nodes)))
    profile = replace(
        prior,
        source="Fitted to sessions that ran alone.",
        target=_target(streams, rounds, prior.target),
        draft=_draft(streams, rounds, prior.draft),
        network=NetworkProfile(statistics.median(_overhead(each) for each in rounds) / CALLS),
    )
    by_prompt = {number: [each for each in streams if each.prompt == number] for number in {s.prompt for s in streams}}
    tokens = {number: _tokens_of_rounds(own, size) for number, own in by_prompt.items()}
    kinds = {
        number: RequestKind(
            _context(own[0]), own[0].num_tokens, acceptance=acceptance_with(prior.acceptance, size, mean)
        )
        for number, own, mean in ((number, by_prompt[number], tokens[number]) for number in sorted(by_prompt))
    }
    return Fitted(profile, kinds, size)


def _overhead(each: RoundRecord) -> float:
    """Seconds of a round outside both workers."""
    return max(0.0, each.total - each.draft - each.target)


def _sweeps(streams: Sequence[StreamRecord]) -> list[tuple[int, float, float]]:
    """Rows, seconds, and seconds of waiting for weights of every sweep; a stream's first sweep reads its prompt."""
    found = []
    for stream in streams:
        context = max(0, stream.prompt_tokens - stream.cached_tokens - 1)
        for index, each in enumerate(stream.rounds):
            rows = max(1, each.num_nodes) + (0 if index else context)
            found.append((rows, each.target - each.queue, each.wait))
    return found


def _target(streams: Sequence[StreamRecord], rounds: Sequence[RoundRecord], prior: TargetProfile) -> TargetProfile:
    """The target's profile: link seconds from sweeps that waited; the prior's compute curve scaled to the others."""
    sweeps = [(rows, seconds, wait) for rows, seconds, wait in _sweeps(streams) if seconds > 0]
    waited = [seconds for _, seconds, wait in sweeps if wait > WAITED * seconds]
    ratios = defaultdict(list)
    for rows, seconds, wait in sweeps:
        ratios[int(math.log2(rows))].append((rows, (seconds - wait) / prior.compute_seconds(rows)))
    known = [np.median(np.array(each), axis=0) for _, each in sorted(ratios.items())]
    places, factors = np.log([rows for rows, _ in known]), [factor for _, factor in known]
    points = [row for row, _ in prior.compute_curve] or [1.0, 8.0, 16.0, 64.0, 256.0]
    stretched = [prior.compute_seconds(int(row)) * float(np.interp(math.log(row), places, factors)) for row in points]
    curve = tuple(zip(points, np.maximum.accumulate(stretched).tolist(), strict=True))
    tree_seconds = [each.target - each.queue for each in rounds if each.num_nodes == rounds[0].num_nodes]
    return replace(
        prior,
        link_seconds=statistics.median(waited) if waited else 0.0,
        compute_curve=curve,
        compute_base_seconds=0.0,
        compute_row_seconds=0.0,
        overhead_seconds=0.0,
        jitter=_spread(tree_seconds),
    )


def _spread(values: Sequence[float]) -> float:
    """Relative standard deviation, estimated from quartiles to be robust against outliers."""
    if len(values) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return min(1.0, (high - low) / 1.35 / middle) if middle > 0 else 0.0


def _draft(streams: Sequence[StreamRecord], rounds: Sequence[RoundRecord], prior: DraftProfile) -> DraftProfile:
    """The draft's profile: the prior's step seconds scaled; a first round's remaining time is reading the prompt."""
    drafted = [each for each in rounds if each.depth]
    if not drafted:
        return prior
    stretch = statistics.median(
        each.draft / each.depth / prior.step_seconds(of_size(each.num_nodes, each.depth).width) for each in drafted
    )
    draft = replace(prior, base_seconds=prior.base_seconds * stretch, row_seconds=prior.row_seconds * stretch)
    typical = statistics.median(each.draft for each in drafted)
    reading = [
        max(0.0, stream.rounds[0].draft - typical) / stream.prompt_tokens
        for stream in streams
        if stream.rounds[0].depth
    ]
    return replace(draft, prefill_token_seconds=statistics.median(reading) if reading else prior.prefill_token_seconds)


def _context(stream: StreamRecord) -> int:
    """Tokens of a prompt that had to be computed, without those cached from other sessions."""
    return max(1, stream.prompt_tokens - stream.cached_tokens)


def _tokens_of_rounds(own: Sequence[StreamRecord], size: BestFirst) -> float:
    """Tokens of a prompt's rounds with nearly whole trees, without the last round, which is truncated.

    They may be few, but with other sessions the text is the same, and so is its acceptance.
    """
    whole = [each.num_tokens for one in own for each in one.rounds[:-1] if each.num_nodes >= size.budget // 2]
    return statistics.mean(whole) if whole else 1.0


def acceptance_with(prior: AcceptanceModel, size: BestFirst, tokens: float) -> AcceptanceModel:
    """The prior with the first rank for which rounds of this size yield the given tokens, found by bisection.

    Later ranks share the remaining probability as in the prior.
    """
    first, rest = prior.rows[0][0], prior.rows[0][1:]

    def with_first(prob: float) -> AcceptanceModel:
        scale = (1 - prob) / (1 - first) if first < 1 else 0.0
        return replace(prior, rows=((prob, *(min(prob, other * scale) for other in rest)),))

    low, high = 0.01, 0.99
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        guesses = TextModel(with_first(middle), FIRST_WORD, NUM_WORDS)
        low, high = (middle, high) if expected_tokens(guesses, size) < tokens else (low, middle)
    return with_first((low + high) / 2)


def compare(runs: Sequence[RunRecord], fitted: Fitted, gather: float, *, is_sized: bool) -> dict[str, Any]:
    """Predictions and measurements by number of sessions; with `is_sized`, tree sizes are chosen instead of fixed."""
    found: dict[str, Any] = {}
    for num_sessions in sorted({run.num_sessions for run in runs}):
        own = [run for run in runs if run.num_sessions == num_sessions]
        predicted = [
            each
            for run in own[: len(own) if num_sessions == 1 else 1]
            for each in _predict(run, fitted, gather, is_sized)
        ]
        rate = statistics.median(run.tokens_per_second for run in own)
        p95 = statistics.median(_p95([each.latency for each in run.streams]) for run in own)
        if num_sessions == 1:
            p95 = _p95([each.latency for run in own for each in run.streams])
            rate = sum(each.num_tokens for run in own for each in run.streams) / sum(run.seconds for run in own)
        found[str(num_sessions)] = _figures(num_sessions, predicted, rate, p95)
    return found


def _p95(values: Sequence[float]) -> float:
    return float(np.percentile(values, 95))


def _predict(run: RunRecord, fitted: Fitted, gather: float, is_sized: bool) -> list[CapacityReport]:
    kinds = tuple(
        fitted.kinds[each.prompt]._replace(prompt_tokens=_context(each))
        for each in run.streams
        if each.prompt in fitted.kinds
    )
    if len(kinds) != len(run.streams):
        raise ConfigError(
            "--sessions: must be a file whose prompts were all asked by a session alone, got one with others"
        )
    scenario = Scenario(
        fitted.profile,
        num_users=run.num_sessions,
        kinds=kinds,
        gather=gather,
        fixed=None if is_sized else fitted.size,
        requests_each=len(kinds) // run.num_sessions,
    )
    return [simulate(replace(scenario, seed=seed)) for seed in SEEDS]


def _figures(num_sessions: int, predicted: list[CapacityReport], rate: float, p95: float) -> dict[str, Any]:
    if num_sessions == 1:  # each prompt was run alone
        tokens = sum(each.tokens_per_second * each.measured_seconds for each in predicted)
        predicted_rate = tokens / sum(each.measured_seconds for each in predicted)
        by_seed = [predicted[seed :: len(SEEDS)] for seed in range(len(SEEDS))]
        predicted_p95 = statistics.median(_p95([each.latency.p50 for each in own]) for own in by_seed)
    else:
        predicted_rate = statistics.median(each.tokens_per_second for each in predicted)
        predicted_p95 = statistics.median(each.latency.p95 for each in predicted)
    rate_error, p95_error = predicted_rate / rate - 1, predicted_p95 / p95 - 1
    return {
        "tokens_per_second": round(rate, 3),
        "predicted_tokens_per_second": round(predicted_rate, 3),
        "throughput_error": round(rate_error, 4),
        "p95_seconds": round(p95, 3),
        "predicted_p95_seconds": round(predicted_p95, 3),
        "p95_error": round(p95_error, 4),
        "is_within": bool(abs(rate_error) <= THROUGHPUT_WITHIN and abs(p95_error) <= P95_WITHIN),
    }
