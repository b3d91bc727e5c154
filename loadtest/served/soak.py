"""Soak test: minutes of load without errors and without growth of memory, descriptors, tasks, keys or latency."""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import redis.asyncio

from bough.registry.registry import ENDED_SECONDS
from loadtest.common.stacks import http_url_of
from loadtest.locust.samples import Sample, percentile
from loadtest.served.stack import Stack, stack, write_profile
from loadtest.served.streams import Api, Ask, GrpcApi, HttpApi, closed_loop

SWEEP_SECONDS = 0.02
ANSWER_TOKENS = 16
WARM_SHARE = 0.25  # share of the time for warm-up, in which caches fill
SNAPSHOTS = 40
MOST_GROWTH = {
    "memory_bytes": 64 * 2**20,
    "descriptors": 8,
    "threads": 8,
    "tasks": 8,
}  # limits of a process; more is a leak
KEY_BYTES = 1024  # index memory for each further key: the record of a short answer, and its entry in a ledger
KEPT_SECONDS = ENDED_SECONDS + 5.0  # lifetime of a request's keys after its answer
# A request leaves its record, its tokens and its session's epoch; up to a tenth of the expired keys may remain.
KEYS_OF_REQUEST = 3.5
OTHER_KEYS = 64  # of workers, ledgers, and requests that arrive while keys are counted
TASKS = re.compile(r"^bough_event_loop_tasks(?:{.*})? ([0-9.e+]+)$", re.MULTILINE)

Snapshot = dict[str, dict[str, int]]  # by process and figure
Snapshots = list[tuple[float, Snapshot]]  # each with its time in seconds since the load began
Uses = tuple[float, dict[str, float]]  # processor seconds at a moment, by process


async def snapshot(running: Stack, url: str, tls: ssl.SSLContext | None = None) -> Snapshot:
    """Memory, descriptors and threads by process, tasks of the orchestrator, and keys of the index."""
    figures = {}
    for name, process_id in running.process_ids().items():
        status = Path(f"/proc/{process_id}/status").read_text()
        kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        figures[name] = {
            "memory_bytes": kilobytes * 1024,
            "descriptors": len(os.listdir(f"/proc/{process_id}/fd")),
            "threads": len(os.listdir(f"/proc/{process_id}/task")),
        }
    client = redis.asyncio.Redis.from_url(running.index_url)
    figures["index"]["keys"] = await client.dbsize()
    await client.aclose()
    async with httpx.AsyncClient(trust_env=False, verify=tls or False) as api:
        num_tasks = tasks_in((await api.get(f"{url}/metrics")).text)
    for name in figures:
        if name.startswith("orchestrator"):
            figures[name]["tasks"] = num_tasks
    return figures


def tasks_in(metrics: str) -> int:
    """Number of tasks in an orchestrator's event loop, from its metrics."""
    return round(sum(map(float, TASKS.findall(metrics))))


def leaks(growth: Snapshot, in_flight: int = 0) -> list[str]:
    """Figures that grew by more than their limit, which includes `in_flight` running requests.

    Keys are limited by `keys_beyond` instead; more keys allow the index more memory.
    """
    if not growth:
        return ["growth is unknown: the soak was too short to measure it twice"]
    return [
        f"{process}: {figure} grew by {more}"
        for process, figures in growth.items()
        for figure, more in figures.items()
        if figure in MOST_GROWTH and more > MOST_GROWTH[figure] + in_flight + _bytes_of_keys(figure, figures)
    ]


def _bytes_of_keys(figure: str, figures: dict[str, int]) -> int:
    return KEY_BYTES * max(0, figures.get("keys", 0)) if figure == "memory_bytes" else 0


def keys_beyond(snapshots: Snapshots, samples: list[Sample], began: float) -> list[str]:
    """The time at which the index had most keys of no request of the last `KEPT_SECONDS`, if there were too many."""
    found: list[tuple[float, str]] = []
    for moment, figures in snapshots:
        now, keys = began + moment, figures["index"]["keys"]
        kept = sum(s.began <= now and s.began + s.seconds > now - KEPT_SECONDS for s in samples)
        beyond = keys - KEYS_OF_REQUEST * kept - OTHER_KEYS
        found.append((beyond, f"index: {keys} keys at {moment:.0f} s, of {kept} requests of {KEPT_SECONDS:.0f} s"))
    beyond, worst = max(found, default=(0.0, ""))
    return [worst] if beyond > 0 else []


async def soak(seconds: float, users: int) -> dict[str, Any]:
    """Run users in a closed loop over both APIs for the given time."""
    with TemporaryDirectory() as folder:
        async with stack(write_profile(Path(folder), SWEEP_SECONDS), ["--max-running", str(users)]) as running:
            address = running.addresses("orchestrator")[0]
            url = await http_url_of(address)
            grpc_api, http_api = GrpcApi(address), HttpApi(url)
            apis: list[Api] = [grpc_api, http_api]
            load = asyncio.create_task(
                closed_loop(apis, users, seconds, lambda n: Ask(f"question {n}", ANSWER_TOKENS, seed=n))
            )
            began, snapshots, uses = time.monotonic(), [], []
            while not load.done():
                await asyncio.wait({load}, timeout=seconds / SNAPSHOTS)
                snapshots.append((time.monotonic() - began, await snapshot(running, url)))
                uses.append((time.monotonic(), {n: processor_use(i) for n, i in running.process_ids().items()}))
            samples = load.result()
            await grpc_api.close()
            await http_api.close()
    growth = _growth(snapshots, seconds)
    leaking = leaks(growth, in_flight=users) + keys_beyond(snapshots, samples, began)
    work = _work(samples, uses, began, seconds)
    latency = _latency(samples, began, seconds)
    return {**latency, "processor_ms_a_request": work, "growth": growth, "leaks": leaking, "users": users}


def processor_use(process_id: int) -> float:
    """Processor seconds of a process's running threads."""
    seconds = 0.0
    for task in Path(f"/proc/{process_id}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            seconds += int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def _work(samples: list[Sample], uses: list[Uses], began: float, seconds: float) -> dict[str, tuple[float, ...]]:
    """Processor milliseconds for a request by process, in the second and the last quarter.

    On a busy machine these show whether later requests cost more than earlier ones; latency does not.
    """
    ends = [sample.began + sample.seconds for sample in samples if not sample.error]
    uses_of: dict[str, list[float]] = {}
    for first, last in ((0.25, 0.5), (0.75, 1.0)):
        within = [use for use in uses if first * seconds <= use[0] - began <= last * seconds]
        if len(within) < 2:
            return {}
        (start, before), (end, after) = within[0], within[-1]
        number = sum(start <= moment < end for moment in ends) or 1
        for name in before:
            uses_of.setdefault(name, []).append(round(1000 * (after[name] - before[name]) / number, 2))
    return {name: tuple(figures) for name, figures in uses_of.items()}


def _latency(samples: list[Sample], began: float, seconds: float) -> dict[str, Any]:
    """Latency in the second and the last quarter, to detect growth."""
    finished = [sample for sample in samples if not sample.error]
    early = [s.seconds for s in finished if 0.25 * seconds <= s.began - began < 0.5 * seconds]
    late = [s.seconds for s in finished if s.began - began >= 0.75 * seconds]
    return {
        "requests": len(samples),
        "failed": len(samples) - len(finished),
        "requests_per_second": round(len(finished) / seconds, 2),
        "p95_early_seconds": round(percentile(early, 95), 4),
        "p95_late_seconds": round(percentile(late, 95), 4),
    }


def _growth(snapshots: Snapshots, seconds: float) -> Snapshot:
    """Growth by process and figure: the last quarter's minimum less the second quarter's.

    Minima over several moments leave out what is only in flight.
    """
    early = [figures for moment, figures in snapshots if WARM_SHARE * seconds <= moment < 0.5 * seconds + 1]
    late = [figures for moment, figures in snapshots if moment >= 0.75 * seconds]
    if not early or not late:
        return {}
    return {
        process: {
            figure: min(each[process][figure] for each in late) - min(each[process][figure] for each in early)
            for figure in early[0][process]
        }
        for process in early[0]
    }
