"""Measures how busy the link is over consecutive rounds of the whole pipeline, for `loadtest.sweep`.

    python -m loadtest.sweep.rounds 64

Ends with one JSON line: the share of ten rounds, with trees of so many nodes and drafting between them, during which
the link was reading, and means of where their seconds went.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bough.cli.flags.machine import up_arguments
from bough.cli.machine.up import settings_from
from bough.client import Client
from bough.processes.launch import launched
from bough.protocol.generation import GenerateOptions, Speculation, TextPrompt, Tokens
from loadtest.common.limits import drop_cached, limited

NUM_ROUNDS = 10
SIZES = (16, 64)  # numbers of nodes
MEMORY = {
    "BOUGH_TARGET_RING_MEMORY": "1GB",
    "BOUGH_TARGET_KV_MEMORY": "650MB",
}  # a ring that holds what arrives during drafting


async def link_busy(num_nodes: int) -> dict[str, Any]:
    """Measure the pipeline as `bough demo` starts it, with other memory settings."""
    os.environ.update(MEMORY)
    rounds: list[Tokens] = []
    async with launched(settings_from(up_arguments()), lambda _: None) as cluster, Client(cluster.address) as client:
        speculation = Speculation(budget=num_nodes)
        options = GenerateOptions(temperature=0.0, max_tokens=128, ignore_eos=True, speculation=speculation)
        async for event in client.generate(TextPrompt("The history of the lighthouse begins with"), options):
            if isinstance(event, Tokens):
                rounds.append(event)
            if len(rounds) > NUM_ROUNDS:
                break
    counted = [event.timings for event in rounds[1:]]  # the first also reads the prompt
    names = ("link", "draft", "wait", "compute", "total")
    means = {f"{n}_seconds": sum(getattr(t, f"{n}_ns") for t in counted) / NUM_ROUNDS / 1e9 for n in names}
    return {"link_busy": means["link_seconds"] / means["total_seconds"], **means}


def link_busy_at(speeds: Sequence[int], model: Path, memory: int) -> dict[str, Any]:
    """Measure with new processes for each link speed in bytes per second; 0 is unlimited.

    `memory` is the limit of all processes together, page cache included; 0 is none.
    """
    results: dict[int, dict[int, Any]] = {speed: {} for speed in speeds}
    for speed, num_nodes in itertools.product(speeds, SIZES):
        drop_cached(model)
        with limited(memory, speed, model) as prefix:
            command = [*prefix, sys.executable, "-m", "loadtest.sweep.rounds", str(num_nodes)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[speed][num_nodes] = json.loads(output.splitlines()[-1])
    busy = {speed: {n: round(each["link_busy"], 4) for n, each in some.items()} for speed, some in results.items()}
    return {
        "link_busy": busy[max(speeds)] if max(speeds) else None,
        "link_busy_unlimited": busy[0],
        "rounds": {f"{speed / 1e9} GB/s" if speed else "unlimited": some for speed, some in results.items()},
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(link_busy(int(sys.argv[1])))))
