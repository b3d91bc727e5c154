"""What a door adds to a first token and to each chunk, beside gRPC straight to the orchestrator."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.served.streams import Answered, Ask, Door

DIRECT = "grpc"


async def compare_doors(doors: Mapping[str, Door], asks: Sequence[Ask], seed: int) -> dict[str, list[Answered]]:
    """Every request through every door, in an order that is drawn anew for each; by door, in the order of `asks`.

    Each is asked once beforehand and not counted, so that its prompt's KV is there for all alike.

    Raises:
        RuntimeError: a request failed, or a door gave another text than the others.
    """
    rng = random.Random(seed)
    answers: dict[str, list[Answered]] = {name: [] for name in doors}
    for ask in asks:
        await doors[DIRECT](ask)
        for name in rng.sample([*doors], len(doors)):
            answered = await doors[name](ask)
            if answered.sample.error:
                raise RuntimeError(f"{name}: {answered.sample.error}")
            answers[name].append(answered)
        texts = {name: each[-1].text for name, each in answers.items()}
        if len(set(texts.values())) > 1:
            raise RuntimeError(f"the doors give different texts: {texts}")
    return answers


def door_figures(answers: Mapping[str, Sequence[Answered]]) -> dict[str, Any]:
    """Ratios (geometric means over requests, each paired with the same request over gRPC) and what a door adds."""
    direct = [answered.sample for answered in answers[DIRECT]]
    figures = {}
    for name, each in answers.items():
        if name == DIRECT:
            continue
        samples = [answered.sample for answered in each]
        pairs = list(zip(samples, direct, each, strict=True))
        added_chunk = [
            (s.seconds - s.first_token_seconds - d.seconds + d.first_token_seconds) / max(1, a.num_events - 1)
            for s, d, a in pairs
        ]
        figures[name] = {
            "ttft_ratio": _geomean([s.first_token_seconds / d.first_token_seconds for s, d, _ in pairs]),
            "tpot_ratio": _geomean([s.token_seconds / d.token_seconds for s, d, _ in pairs if d.token_seconds > 0]),
            "added_ttft_ms": round(
                1000 * statistics.median(s.first_token_seconds - d.first_token_seconds for s, d, _ in pairs), 3
            ),
            "added_chunk_ms": round(1000 * statistics.median(added_chunk), 3),
            "requests": len(pairs),
        }
    return figures


def _geomean(ratios: Sequence[float]) -> float:
    return round(math.exp(statistics.fmean(math.log(ratio) for ratio in ratios)), 4) if ratios else 1.0
