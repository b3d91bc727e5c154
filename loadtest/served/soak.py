"""Minutes at a high rate: no error, and nothing that grows: memory, descriptors, tasks, keys of the index, latency."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import redis.asyncio

from loadtest.common.stacks import http_url_of
from loadtest.locust.samples import Sample, percentile
from loadtest.served.profiles import write_profile
from loadtest.served.stack import Stack, stack
from loadtest.served.streams import Ask, Door, GrpcDoor, HttpDoor, closed_loop

SWEEP_SECONDS = 0.02
ANSWER_TOKENS = 16
WARM_SHARE = 0.25  # of the time, before anything is compared: caches fill
SNAPSHOTS = 12


async def snapshot(running: Stack) -> dict[str, dict[str, int]]:
    """Memory and descriptors by process, and keys of the index."""
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
    return figures


async def soak(seconds: float, users: int) -> dict[str, Any]:
    """Users who ask again and again, over both doors, for so long."""
    with TemporaryDirectory() as folder:
        async with stack(write_profile(Path(folder), SWEEP_SECONDS), ["--max-running", str(users)]) as running:
            address = running.addresses("orchestrator")[0]
            grpc_door, http_door = GrpcDoor(address), HttpDoor(await http_url_of(address))
            doors: list[Door] = [grpc_door, http_door]
            load = asyncio.create_task(
                closed_loop(doors, users, seconds, lambda n: Ask(f"question {n}", ANSWER_TOKENS, seed=n))
            )
            began, snapshots = time.monotonic(), []
            while not load.done():
                await asyncio.wait({load}, timeout=seconds / SNAPSHOTS)
                snapshots.append((time.monotonic() - began, await snapshot(running)))
            samples = load.result()
            await grpc_door.close()
            await http_door.close()
    return {**_latency(samples, began, seconds), "growth": _growth(snapshots, seconds), "users": users}


def _latency(samples: list[Sample], began: float, seconds: float) -> dict[str, Any]:
    """Of the second and the last quarter: a leak of time shows as growth between them."""
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


def _growth(snapshots: list[tuple[float, dict[str, dict[str, int]]]], seconds: float) -> dict[str, dict[str, int]]:
    """By process and figure: the last quarter's least over the second quarter's least, as a difference.

    The least of several moments passes over what is only in flight.
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
