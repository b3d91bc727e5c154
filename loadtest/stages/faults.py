"""Disturbs a stage while streams run, and compares each stream with its undisturbed text."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bough.client import Client
from bough.processes.launch import Cluster
from loadtest.chaos.streams import HANG_SECONDS, Streams, make_scripts, undisturbed
from loadtest.cluster.hosts import Host
from loadtest.common.stacks import settings_of
from loadtest.common.tiny_model import TINY, save_model
from loadtest.stages.hosts import STAGE_1, served

KINDS = ("killed", "stopped", "cut off")
NUM_STREAMS, NUM_SCRIPTS, MOST_TOKENS = 4, 8, 240
CALM_SECONDS = (0.5, 3.0)  # before each fault
DOWN_SECONDS = (0.0, 3.0)  # between a kill and the restart
FAULT_SECONDS = ((0.2, 3.0), (10.0, 13.0))  # of other faults, half of each: silence of 10 s ends an epoch


async def disturb(num_faults: int, seed: int, head: Host, stage: Host, folder: Path) -> dict[str, Any]:
    """Cause `num_faults` faults, every kind as often as any other, and return figures of the streams."""
    model = ["--model", str(save_model(folder, TINY)), "--dtype", "float32", "--threads", "1", "--max-nodes", "32"]
    target = [*model, "--kv-memory", "8MB", "--lease-seconds", "2"]
    settings = settings_of(target, [*model, "--drop-layers", "2"], ["--failover-timeout", "300"])
    rng = random.Random(seed)
    scripts = make_scripts(NUM_SCRIPTS, rng, TINY.vocab_size - 2, MOST_TOKENS)
    async with served(settings, [head, stage]) as cluster:
        async with Client(cluster.address) as client:
            answers = [await undisturbed(client, script) for script in scripts]
        streams = Streams([cluster.address], scripts, answers, "stages")
        running = asyncio.create_task(streams.run(NUM_STREAMS, random.Random(rng.random())))
        kinds = [KINDS[number % len(KINDS)] for number in range(num_faults)]
        rng.shuffle(kinds)
        waits = []
        for number, kind in enumerate(kinds, start=1):
            await asyncio.sleep(rng.uniform(*CALM_SECONDS))
            seconds = rng.uniform(*(DOWN_SECONDS if kind == "killed" else rng.choice(FAULT_SECONDS)))
            print(f"{time.strftime('%H:%M:%S')} {number}: {kind}, {seconds:.1f} s", file=sys.stderr, flush=True)
            await _fault(cluster, stage, kind, seconds)
            waits.append(await _seconds_to_a_token(streams))
        streams.stop()
        await running
    tally = streams.tally
    return {
        "faults": num_faults,
        "faults_by_kind": dict(Counter(kinds)),
        "lost_tokens": tally.lost_tokens,
        "repeated_tokens": tally.repeated_tokens,
        "unequal_streams": tally.unequal,
        "hung_streams": tally.hung,
        "failed_streams": dict(tally.statuses + tally.unclear),
        "streams_finished": tally.finished,
        "tokens": tally.tokens,
        "most_seconds_to_a_token": round(max(waits, default=0.0), 1),  # after the end of a fault
    }


async def _fault(cluster: Cluster, stage: Host, kind: str, seconds: float) -> None:
    """Cause a fault and undo it after some seconds."""
    process = cluster.children[STAGE_1].process
    if kind == "killed":
        process.kill()
        process.wait()
        await asyncio.sleep(seconds)
        cluster.restart(STAGE_1)
    elif kind == "stopped":
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(process.pid, signal.SIGCONT)
    else:
        stage.cut_off()
        await asyncio.sleep(seconds)
        stage.bring_back()


async def _seconds_to_a_token(streams: Streams) -> float:
    """Wait until some stream has got a token; at most until streams count as hung."""

    def num_tokens() -> int:
        return streams.tally.tokens + sum(len(each.token_ids) for each in streams.running.values())

    began, before = time.monotonic(), num_tokens()
    while num_tokens() <= before and time.monotonic() < began + HANG_SECONDS:
        await asyncio.sleep(0.05)
    return time.monotonic() - began
