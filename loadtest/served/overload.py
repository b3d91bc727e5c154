"""Measures overload: the peak of goodput under an objective, then five times the peak's requests, and refusals.

Request rates climb until goodput stops rising. Each rate is scored by tokens of requests that met `OBJECTIVE` and ended
after `FILL_SECONDS`, when the queue has filled. The peak is measured again after the overload, because the machine may
have changed. Requests are sent without waiting for answers; the figures report how late this process sent them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from loadtest.common.stacks import http_url_of
from loadtest.locust.samples import Objective, Sample, percentile
from loadtest.served.stack import stack, write_profile
from loadtest.served.streams import Api, Ask, GrpcApi, HttpApi, closed_loop

RUNNING, WAITING = 16, 4  # a request waits for about a quarter of an answer, some 1 s of the objective's 4
SWEEP_SECONDS = 0.2
# Least and most, as answers of equal lengths that begin together would also end together.
ANSWER_TOKENS = (16, 48)
OBJECTIVE = Objective(first_token_seconds=4.0, token_seconds=0.25)  # a sweep per token, and some overhead
FACTOR = 5.0  # offered requests in overload, over those that ended in time at the peak
FIRST_SHARE, CLIMB = 0.7, 1.25  # first rate / that of a closed loop; each rate / the one before
STEPS_PAST_PEAK = 2  # with less goodput, after which the climb ends
MOST_STEPS = 12
FILL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Offered:
    """Requests that were sent at a rate, and their samples."""

    samples: Sequence[Sample]
    began: float  # on the monotonic clock, like the samples' own
    seconds: float  # in which requests were sent; the last ones ended later
    lateness: Sequence[float]  # seconds by which each was sent later than it was due

    @property
    def requests_per_second(self) -> float:
        """The rate at which requests were sent."""
        return len(self.samples) / self.seconds

    def ended(self) -> list[Sample]:
        """Answers that ended while requests were sent, from `FILL_SECONDS` on."""
        first, last = self.began + FILL_SECONDS, self.began + self.seconds
        return [s for s in self.samples if not s.error and first <= s.began + s.seconds < last]

    def good(self) -> list[Sample]:
        """Those of them within the objective."""
        return [sample for sample in self.ended() if OBJECTIVE.holds(sample)]

    @property
    def goodput(self) -> float:
        """Tokens a second of the good requests."""
        return self._tokens_per_second(self.good())

    def _tokens_per_second(self, samples: Sequence[Sample]) -> float:
        return sum(sample.num_tokens for sample in samples) / (self.seconds - FILL_SECONDS)

    @property
    def good_requests_per_second(self) -> float:
        """Good requests a second."""
        return len(self.good()) / (self.seconds - FILL_SECONDS)

    def figures(self) -> dict[str, Any]:
        """Figures of one step."""
        finished = [sample for sample in self.samples if not sample.error]
        failed = [sample for sample in self.samples if sample.error and not sample.is_refused]
        return {
            "offered_requests_per_second": round(self.requests_per_second, 2),
            "goodput_tokens_per_second": round(self.goodput, 1),
            "tokens_per_second": round(self._tokens_per_second(self.ended()), 1),
            "first_token_p95_seconds": round(percentile([s.first_token_seconds for s in finished], 95), 3),
            "token_p95_seconds": round(percentile([s.token_seconds for s in finished if s.token_seconds], 95), 3),
            "finished": len(finished),
            "beyond_objective": sum(not OBJECTIVE.holds(sample) for sample in finished),
            "refused": sum(sample.is_refused for sample in self.samples),
            "failed": len(failed),
            "failures": sorted({sample.error for sample in failed})[:5],
            "sent_late_p99_seconds": round(percentile(self.lateness, 99), 4),
        }


async def offer(apis: Sequence[Api], rate: float, seconds: float, seed: int) -> Offered:
    """Send requests to the APIs in turn as a Poisson process, without waiting; running ones may finish at the end."""
    rng, began = random.Random(seed), time.monotonic()
    due, lateness, tasks = began, list[float](), list[asyncio.Future[Sample]]()
    while (due := due + rng.expovariate(rate)) < began + seconds:
        await asyncio.sleep(due - time.monotonic())
        lateness.append(time.monotonic() - due)
        tasks.append(asyncio.ensure_future(apis[len(tasks) % len(apis)](_ask(f"question {seed}", len(tasks)))))
    return Offered([await task for task in tasks], began, seconds, lateness)


def _ask(text: str, number: int) -> Ask:
    return Ask(f"{text} {number}", random.Random(number).randint(*ANSWER_TOKENS), seed=number)


async def climb(apis: Sequence[Api], rate: float, seconds: float, seed: int) -> list[Offered]:
    """Offer rates from `rate` on, until `STEPS_PAST_PEAK` of them had less goodput than the best one."""
    steps: list[Offered] = []
    while len(steps) < MOST_STEPS and not _is_past_peak([step.goodput for step in steps]):
        steps.append(await offer(apis, rate, seconds, seed + len(steps)))
        rate *= CLIMB
    return steps


def _is_past_peak(goodputs: Sequence[float]) -> bool:
    """Whether goodput has risen above 0, and the last steps were not better than one before them."""
    best = max(goodputs, default=0.0)
    return best > 0 and len(goodputs) - 1 - goodputs.index(best) >= STEPS_PAST_PEAK


async def overload(seconds: float, seed: int) -> dict[str, Any]:
    """Find the peak of goodput, and offer `FACTOR` times its requests; `seconds` are of each rate."""
    with TemporaryDirectory() as folder:
        profile = write_profile(Path(folder), SWEEP_SECONDS, knee_rows=512)
        flags = ["--max-running", str(RUNNING), "--max-waiting", str(WAITING)]
        async with stack(profile, flags) as running:
            address = running.addresses("orchestrator")[0]
            grpc_api, http_api = GrpcApi(address), HttpApi(await http_url_of(address))
            apis: list[Api] = [grpc_api, http_api]
            began = time.monotonic()
            waited = await closed_loop(apis, RUNNING, seconds, lambda number: _ask("user", number))
            capacity = sum(not sample.error for sample in waited) / (time.monotonic() - began)
            steps = await climb(apis, FIRST_SHARE * max(capacity, 0.1), seconds, seed)
            best = max(steps, key=lambda step: step.goodput)
            beyond = await offer(apis, FACTOR * best.good_requests_per_second or FACTOR, seconds, seed + MOST_STEPS)
            again = await offer(apis, best.requests_per_second, seconds, seed + MOST_STEPS + 1)
            await grpc_api.close()
            await http_api.close()
    return overload_figures(steps, again, beyond)


def overload_figures(steps: Sequence[Offered], again: Offered, beyond: Offered) -> dict[str, Any]:
    """Figures of the part; the peak is the best of the climb and of `again`, its rate once more."""
    peak = max((*steps, again), key=lambda step: step.goodput)
    best = max(steps, key=lambda step: step.goodput)
    refused = [sample for sample in beyond.samples if sample.is_refused]
    factor = beyond.requests_per_second / best.good_requests_per_second if best.goodput else None
    return {
        "objective_seconds": {"first_token": OBJECTIVE.first_token_seconds, "token": OBJECTIVE.token_seconds},
        "goodput_ratio": round(beyond.goodput / peak.goodput, 4) if peak.goodput else None,
        "peak_tokens_per_second": round(peak.goodput, 1),
        "times_the_peaks_requests": round(factor, 2) if factor else None,
        **beyond.figures(),
        "refusal_p99_seconds": _refusal_seconds(refused, 99),
        "refusal_max_seconds": _refusal_seconds(refused, 100),
        "refused_without_delay": sum(sample.retry_seconds <= 0 for sample in refused),
        "refusals_by_api": _by_api(refused),
        "climb": [step.figures() for step in steps],
        "peak_again": [again.figures()],
    }


def _by_api(refused: Sequence[Sample]) -> Mapping[str, Mapping[str, Any]]:
    """Each API's refusals: their number, how soon they came, and their retry delays."""
    found: dict[str, dict[str, Any]] = {}
    for api in sorted({sample.api for sample in refused}):
        own = [sample for sample in refused if sample.api == api]
        delays = [sample.retry_seconds for sample in own]
        found[api] = {
            "refused": len(own),
            "p99_seconds": _refusal_seconds(own, 99),
            "max_seconds": _refusal_seconds(own, 100),
            "delay_seconds": {"least": min(delays), "median": median(delays), "most": max(delays)},
        }
    return found


def _refusal_seconds(refused: Sequence[Sample], share: float) -> float:
    return round(percentile([sample.seconds for sample in refused], share), 4)
