"""Samples of a load test's requests, and exact figures over many of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PERCENTILES = (50, 90, 95, 99)
UNFINISHED = "the test ended first"  # error of requests cut off by the end of the test


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times are in seconds; they are 0 for a request without tokens."""

    api: str  # "grpc" or "http"
    began: float  # since the start of the test
    seconds: float  # from the request to its end
    first_token_seconds: float = 0.0  # TTFT: from the request to the first event with tokens
    token_seconds: float = 0.0  # TPOT: (last event - first event) / tokens after those of the first event
    longest_gap_seconds: float = 0.0  # between two events with tokens
    num_tokens: int = 0
    users: int = 1  # users, or open streams, when it began
    error: str = ""  # empty for a finished request
    is_refused: bool = False  # RESOURCE_EXHAUSTED or status 429
    retry_seconds: float = 0.0  # retry delay of a refusal; 0 if it has none


@dataclass(slots=True)
class Arrivals:
    """Collects the arrival times of a stream's tokens."""

    began: float
    first: float = 0.0
    last: float = 0.0
    longest_gap: float = 0.0
    num_first: int = 0  # tokens in the first event
    num_tokens: int = 0

    def take(self, now: float, num_tokens: int) -> None:
        """Record the arrival of tokens; 0 tokens are ignored."""
        if num_tokens <= 0:
            return
        if self.num_tokens:
            self.longest_gap = max(self.longest_gap, now - self.last)
        else:
            self.first, self.num_first = now, num_tokens
        self.last = now
        self.num_tokens += num_tokens

    @property
    def first_token_seconds(self) -> float:
        return self.first - self.began if self.num_tokens else 0.0

    @property
    def token_seconds(self) -> float:
        """TPOT: tokens of one event arrive at once, so those of the first have no interval."""
        num_later = self.num_tokens - self.num_first
        return (self.last - self.first) / num_later if num_later else 0.0


@dataclass(frozen=True, slots=True)
class Objective:
    """A service-level objective; goodput counts only requests that meet it."""

    first_token_seconds: float = math.inf
    token_seconds: float = math.inf

    def holds(self, sample: Sample) -> bool:
        """Whether a request finished within the objective."""
        in_time = sample.first_token_seconds <= self.first_token_seconds and sample.token_seconds <= self.token_seconds
        return not sample.error and in_time


def percentile(values: Sequence[float], share: float) -> float:
    """The percentile `share` (0 to 100): the least value that so many per cent do not exceed; 0 if there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)] if ordered else 0.0


def span_seconds(samples: Sequence[Sample]) -> float:
    """Seconds from the first request's begin to the last one's end."""
    ends = (sample.began + sample.seconds for sample in samples)
    return max(ends, default=1.0) - min((sample.began for sample in samples), default=0.0)


def summarise(samples: Sequence[Sample], seconds: float, objective: Objective) -> dict[str, Any]:
    """Figures of the JSON line over requests that ran within `seconds` of wall-clock time.

    Percentiles are of requests that finished; those per token, of answers that came in several events. `goodput` counts
    only tokens and requests within the objective.
    """
    finished = [sample for sample in samples if not sample.error]
    several = [sample for sample in finished if sample.token_seconds]  # an answer that came at once has no interval
    good = [sample for sample in finished if objective.holds(sample)]
    refused = [sample for sample in samples if sample.is_refused]
    unfinished = [sample for sample in samples if sample.error == UNFINISHED]
    failed = [s for s in samples if s.error and not s.is_refused and s.error != UNFINISHED]
    return {
        "requests": len(samples),
        "finished": len(finished),
        "refused": len(refused),
        "unfinished": len(unfinished),
        "failed": len(failed),
        "errors": sorted({sample.error for sample in failed})[:5],
        "seconds": round(seconds, 3),
        "tokens_per_second": round(sum(sample.num_tokens for sample in finished) / seconds, 3),
        "requests_per_second": round(len(finished) / seconds, 3),
        "goodput_tokens_per_second": round(sum(sample.num_tokens for sample in good) / seconds, 3),
        "goodput_requests_per_second": round(len(good) / seconds, 3),
        "first_token_seconds": _spread([sample.first_token_seconds for sample in finished]),
        "token_seconds": _spread([sample.token_seconds for sample in several]),
        "longest_gap_seconds": _spread([sample.longest_gap_seconds for sample in several]),
        "seconds_a_request": _spread([sample.seconds for sample in finished]),
        "refusal_seconds": _spread([sample.seconds for sample in refused]),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    spread = {f"p{share}": round(percentile(values, share), 5) for share in PERCENTILES}
    return {**spread, "max": round(max(values, default=0.0), 5)}


def write_sample(file: Any, sample: Sample) -> None:
    """Append a sample as a line of JSON to an open text file."""
    file.write(json.dumps(asdict(sample)) + "\n")


def read_samples(path: Path) -> list[Sample]:
    """Read all samples of a file; an incomplete last line of a killed process is ignored."""
    return list(_parsed(path.read_text().splitlines())) if path.exists() else []


def _parsed(lines: Iterable[str]) -> Iterable[Sample]:
    for line in lines:
        if line.endswith("}"):
            yield Sample(**json.loads(line))
