"""Measures how many streams an orchestrator serves with a responsive event loop.

The load, the workers, the index and each orchestrator are processes of their own on one machine. Each one's processor
time for a round is told, and for how much of the time an orchestrator was ready to run and had no core: on few cores an
event loop is late for that too.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx

from bough.client import Client
from loadtest.common.processor_use import ProcessorUse, processor_use
from loadtest.locust.samples import percentile
from loadtest.served.profiles import write_profile
from loadtest.served.stack import Stack, stack
from loadtest.served.streams import Ask, GrpcDoor, closed_loop

LAG = "bough_event_loop_lag_seconds"
FIGURE = re.compile(r"^([\w:]+)(?:{([^}]*)})? ([0-9.e+]+)$", re.MULTILINE)
BOUND = re.compile(r'le="([^"]+)"')
MOST_LAG_SECONDS = 0.05  # p99 lag from which the event loop counts as overloaded
ANSWER_TOKENS = 48
MAX_NODES = 20  # of a tree: 200 trees fill a sweep; without a limit the first sessions' trees have hundreds
SETTLE_SECONDS = 5.0  # before measuring, as all streams start at once


class Reading(NamedTuple):
    """A reading of an orchestrator's `/metrics`."""

    lags: dict[float, float]  # cumulative counts of lags by bound in seconds
    num_rounds: float
    num_tokens: float

    @classmethod
    def of(cls, text: str) -> Reading:
        """Sum a histogram over all labels except the bound."""
        lags, sums = dict[float, float](), defaultdict[str, float](float)
        for name, labels, value in FIGURE.findall(text):
            sums[name] += float(value)
            if name == f"{LAG}_bucket" and (bound := BOUND.search(labels)):
                lags[float(bound[1].replace("+Inf", "inf"))] = float(value)
        return cls(lags, sums["bough_sizer_rounds_total"], sums["vllm:generation_tokens_total"])

    def lag_p99(self, earlier: Reading) -> float:
        """Bound of the bucket with the 99th percentile of lags since an earlier reading; inf if the loop stood."""
        counts = {bound: count - earlier.lags.get(bound, 0.0) for bound, count in self.lags.items()}
        most = max(counts.values())
        return min(bound for bound, count in counts.items() if count >= 0.99 * most) if most else inf


async def carry(numbers: Sequence[int], sweep_seconds: float, seconds: float, speculates: bool) -> list[dict[str, Any]]:
    """Run `_step` for increasing numbers of streams until the event loop is overloaded.

    Without `speculates` streams need no draft worker, which on few cores is the first to have no time left.
    """
    steps: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        profile = write_profile(Path(folder), sweep_seconds, max_nodes=MAX_NODES)
        async with stack(profile, room_for(max(numbers))) as running:
            door = GrpcDoor(running.addresses("orchestrator")[0])
            for number in numbers:
                steps.append(await _step(running, door, number, seconds, speculates))
                if steps[-1]["loop_lag_p99_seconds"] > MOST_LAG_SECONDS:
                    break
            await door.close()
    return steps


def room_for(num_streams: int) -> list[str]:
    """An orchestrator's flags with which so many streams run at once."""
    return ["--max-running", str(num_streams), "--max-waiting", str(num_streams)]


async def _step(running: Stack, door: GrpcDoor, number: int, seconds: float, speculates: bool) -> dict[str, Any]:
    """Figures of a number of concurrent streams; they begin `SETTLE_SECONDS` after these."""
    load = asyncio.create_task(
        closed_loop([door], number, seconds, lambda n: Ask(f"question {n}", ANSWER_TOKENS, n, speculates=speculates))
    )
    await asyncio.sleep(SETTLE_SECONDS)
    figures = await measured(running, number, max(1.0, seconds - SETTLE_SECONDS))
    samples = await load
    finished = [sample for sample in samples if not sample.error]
    return figures | {
        "first_token_p95_seconds": round(percentile([s.first_token_seconds for s in finished], 95), 3),
        "failed": len(samples) - len(finished),
    }


async def measured(running: Stack, num_streams: int, seconds: float) -> dict[str, Any]:
    """Figures of the next seconds: the largest event-loop lag, rounds, tokens, and processor time."""
    urls = [await _metrics_url(address) for address in running.addresses("orchestrator")]
    process_ids = running.process_ids() | {"load": os.getpid()}
    before, used_before, began = await _read(urls), _uses(process_ids), time.monotonic()
    await asyncio.sleep(seconds)
    after, used, window = await _read(urls), _uses(process_ids), time.monotonic() - began
    num_rounds = sum(now.num_rounds - then.num_rounds for now, then in zip(after, before, strict=True))
    num_tokens = sum(now.num_tokens - then.num_tokens for now, then in zip(after, before, strict=True))
    spent = {name: used[name] - used_before[name] for name in used}
    loops = [use for name, use in spent.items() if name.startswith("orchestrator")]
    return {
        "streams": num_streams,
        "orchestrators": len(urls),
        "loop_lag_p99_seconds": min(  # one that stood was late by all of the window; JSON has no inf
            round(window, 3), max(now.lag_p99(then) for now, then in zip(after, before, strict=True))
        ),
        "orchestrators_waited_for_a_core": round(sum(use.waited for use in loops) / window / len(loops), 3),
        "rounds_per_second": round(num_rounds / window, 1),
        "tokens_per_second": round(num_tokens / window, 1),
        "orchestrator_ms_a_stream_and_second": round(1000 * sum(use.ran for use in loops) / window / num_streams, 2),
        "processor_ms_a_round": {name: round(1000 * use.ran / (num_rounds or 1.0), 2) for name, use in spent.items()},
    }


async def _read(urls: Sequence[str]) -> list[Reading]:
    async with httpx.AsyncClient(trust_env=False) as client:
        return [Reading.of((await client.get(url, timeout=60.0)).text) for url in urls]


def _uses(process_ids: dict[str, int]) -> dict[str, ProcessorUse]:
    return {name: processor_use(process_id) for name, process_id in process_ids.items()}


async def _metrics_url(address: str) -> str:
    async with Client(address) as client:
        return (await client.server_info()).metrics_url
