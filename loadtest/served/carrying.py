"""How many streams an orchestrator carries while its event loop stays prompt, and what a second one adds."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from bough.client import Client
from loadtest.locust.samples import percentile
from loadtest.served.profiles import write_profile
from loadtest.served.stack import stack
from loadtest.served.streams import Ask, GrpcDoor, closed_loop

LAG = "bough_event_loop_lag_seconds"
BUCKET = re.compile(rf'^{LAG}_bucket{{le="([^"]+)".*}} ([0-9.e+]+)$', re.MULTILINE)
MOST_LAG_SECONDS = 0.05  # at which the loop has bent
ANSWER_TOKENS = 48
SETTLE_SECONDS = 3.0  # before the lag is read: streams begin at once, which is no steady state


async def lag_p99(metrics_url: str, during: asyncio.Task[Any], after_seconds: float) -> float:
    """The bucket's bound that 99 % of the event loop's lags did not pass, from a moment on until a task is done."""
    async with httpx.AsyncClient(trust_env=False) as client:
        await asyncio.sleep(after_seconds)
        before = _buckets((await client.get(metrics_url)).text)
        await during
        after = _buckets((await client.get(metrics_url)).text)
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in after}
    total = max(counts.values(), default=0.0)
    return min((bound for bound, count in counts.items() if count >= 0.99 * total), default=float("inf"))


def _buckets(text: str) -> dict[float, float]:
    return {float(bound.replace("+Inf", "inf")): float(count) for bound, count in BUCKET.findall(text)}


async def carry(numbers: Sequence[int], sweep_seconds: float, seconds: float, replicas: int) -> list[dict[str, Any]]:
    """For each number of streams: lag of the busiest event loop, tokens per second, TTFT; ends where the loop bends."""
    steps: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        profile = write_profile(Path(folder), sweep_seconds)
        flags = ["--max-running", str(max(numbers)), "--max-waiting", str(max(numbers))]
        async with stack(profile, flags) as running:
            for _ in range(replicas - 1):
                await running.add("orchestrator")
            addresses = running.addresses("orchestrator")
            doors = [GrpcDoor(address) for address in addresses]
            urls = [await _metrics_url(address) for address in addresses]
            for number in numbers:
                began = time.monotonic()
                load = asyncio.create_task(
                    closed_loop(doors, number, seconds, lambda n: Ask(f"question {n}", ANSWER_TOKENS, seed=n))
                )
                lags = await asyncio.gather(*(lag_p99(url, load, SETTLE_SECONDS) for url in urls))
                samples, took = load.result(), time.monotonic() - began
                finished = [sample for sample in samples if not sample.error]
                steps.append(
                    {
                        "streams": number,
                        "orchestrators": replicas,
                        "loop_lag_p99_seconds": max(lags),
                        "tokens_per_second": round(sum(s.num_tokens for s in finished) / took, 1),
                        "first_token_p95_seconds": round(percentile([s.first_token_seconds for s in finished], 95), 3),
                        "failed": len(samples) - len(finished),
                    }
                )
                if max(lags) > MOST_LAG_SECONDS:
                    break
            for door in doors:
                await door.close()
    return steps


async def _metrics_url(address: str) -> str:
    async with Client(address) as client:
        return (await client.server_info()).metrics_url
