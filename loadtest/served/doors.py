"""Measures what each API adds to the first token and to each chunk, relative to direct gRPC."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.common.ratios import interval, ratio
from loadtest.served.streams import Answered, Ask, Door

DIRECT = "grpc"
NUM_DIGITS = 4


@dataclass(slots=True)
class Comparison:
    """Answers by API in the same order; requests that failed at any API are left out."""

    answers: dict[str, list[Answered]]
    failures: list[str] = field(default_factory=list)
    num_unequal: int = 0  # requests whose texts differ between APIs


async def compare_doors(doors: Mapping[str, Door], asks: Sequence[Ask], seed: int) -> Comparison:
    """Send every request over every API, one after another, in random order.

    Each request is sent once before without being counted, so that its prompt is cached for all.
    """
    rng = random.Random(seed)
    found = Comparison({name: [] for name in doors})
    for ask in asks:
        await doors[DIRECT](ask)
        answered = {name: await doors[name](ask) for name in rng.sample([*doors], len(doors))}
        failures = [f"{name}: {each.sample.error}" for name, each in answered.items() if each.sample.error]
        found.failures += failures
        if failures:
            continue
        found.num_unequal += len({each.text for each in answered.values()}) > 1
        for name, each in answered.items():
            found.answers[name].append(each)
    return found


def door_figures(found: Comparison, seed: int) -> dict[str, Any]:
    """Figures by API, paired by request with direct gRPC; 95 % intervals over requests."""
    direct = found.answers[DIRECT]
    figures: dict[str, Any] = {
        "requests": len(direct),
        "failed": len(found.failures),
        "failures": sorted({*found.failures})[:5],
        "unequal": found.num_unequal,
        "grpc_first_token_seconds": _median([each.sample.first_token_seconds for each in direct]),
        "grpc_token_seconds": _median([each.sample.token_seconds for each in direct]),
    }
    for name, answers in found.answers.items():
        if name != DIRECT and answers:
            figures[name] = _beside_direct(answers, direct, seed)
    return figures


def _beside_direct(answers: Sequence[Answered], direct: Sequence[Answered], seed: int) -> dict[str, Any]:
    pairs = [*zip(answers, direct, strict=True)]
    firsts = [(a.sample.first_token_seconds, d.sample.first_token_seconds) for a, d in pairs]
    # An answer with one event has no time per token.
    tokens = [(a.sample.token_seconds, d.sample.token_seconds) for a, d in pairs]
    tokens = [pair for pair in tokens if min(pair) > 0]
    chunks = [(_later(a) - _later(d)) / max(1, a.num_events - 1) for a, d in pairs]
    return {
        "ttft_ratio": _ratio(firsts, seed),
        "tpot_ratio": _ratio(tokens, seed) if tokens else None,
        "added_ttft_ms": _added([own - other for own, other in firsts], seed),
        "added_chunk_ms": _added(chunks, seed),
    }


def _ratio(pairs: Sequence[tuple[float, float]], seed: int) -> dict[str, Any]:
    return ratio([own for own, _ in pairs], [direct for _, direct in pairs], seed, NUM_DIGITS)


def _later(answered: Answered) -> float:
    """Seconds after the first event."""
    return answered.sample.seconds - answered.sample.first_token_seconds


def _added(seconds: Sequence[float], seed: int) -> dict[str, Any]:
    milliseconds = [1000 * each for each in seconds]
    return {"median": _median(milliseconds), "interval": interval(milliseconds, statistics.median, seed)}


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), NUM_DIGITS) if values else 0.0
