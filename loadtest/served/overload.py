"""Measures five-fold overload: goodput relative to its peak, and refusals."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loadtest.common.stacks import http_url_of
from loadtest.locust.samples import Objective, Sample, percentile, summarise
from loadtest.served.profiles import write_profile
from loadtest.served.stack import stack
from loadtest.served.streams import Ask, Door, GrpcDoor, HttpDoor, closed_loop

RUNNING, WAITING = 16, 16
SWEEP_SECONDS = 0.2
ANSWER_TOKENS = 32
FACTOR = 5.0  # offered load relative to capacity


async def open_loop(doors: list[Door], rate: float, seconds: float, seed: int) -> list[Sample]:
    """Send requests as a Poisson process; running ones may finish at the end."""
    rng, began, number = random.Random(seed), time.monotonic(), 0
    tasks: list[asyncio.Task[Any]] = []
    while time.monotonic() - began < seconds:
        await asyncio.sleep(rng.expovariate(rate))
        number += 1
        ask = Ask(f"overload {number}", ANSWER_TOKENS, seed=number)
        tasks.append(asyncio.ensure_future(doors[number % len(doors)](ask)))
    return [(await task).sample for task in tasks]


async def overload(seconds: float, seed: int) -> dict[str, Any]:
    """Measure capacity with a closed loop, and then `FACTOR` times that load over both APIs."""
    with TemporaryDirectory() as folder:
        profile = write_profile(Path(folder), SWEEP_SECONDS, knee_rows=512)
        flags = ["--max-running", str(RUNNING), "--max-waiting", str(WAITING)]
        async with stack(profile, flags) as running:
            address = running.addresses("orchestrator")[0]
            grpc_door, http_door = GrpcDoor(address), HttpDoor(await http_url_of(address))
            doors: list[Door] = [grpc_door, http_door]
            peak_samples, began = [], time.monotonic()
            peak_samples = await closed_loop(doors, RUNNING, seconds, lambda n: Ask(f"peak {n}", ANSWER_TOKENS, seed=n))
            peak = summarise(peak_samples, time.monotonic() - began, Objective())
            rate, began = FACTOR * peak["requests_per_second"], time.monotonic()
            samples = await open_loop(doors, rate, seconds, seed)
            figures = summarise(samples, time.monotonic() - began, Objective())
            await grpc_door.close()
            await http_door.close()
    refused = [sample for sample in samples if sample.is_refused]
    seconds_to_refusal = [sample.seconds for sample in refused]
    return {
        "goodput_ratio": round(figures["goodput_tokens_per_second"] / peak["goodput_tokens_per_second"], 4),
        "peak_tokens_per_second": peak["goodput_tokens_per_second"],
        "offered_requests_per_second": round(rate, 2),
        "refusal_p99_seconds": percentile(seconds_to_refusal, 99),
        "refusal_max_seconds": max(seconds_to_refusal, default=0.0),
        "refused": len(refused),
        "refused_without_delay": sum(sample.retry_seconds <= 0 for sample in refused),
        "failed": figures["failed"],
        "finished": figures["finished"],
    }
