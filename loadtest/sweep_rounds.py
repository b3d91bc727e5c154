"""How busy the link is over consecutive rounds of the whole pipeline, for `loadtest.sweep`.

    python -m loadtest.sweep_rounds

Ends with one JSON line: the share of ten rounds with drafting between them during which the link was reading, and means
of where their seconds went.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bough.client import Client
from bough.commands.demo import UP_DEFAULTS
from bough.commands.up import settings_from
from bough.generation import GenerateOptions, TextPrompt, Tokens
from bough.launch import launched
from loadtest.limits import drop_cached, limited

NUM_ROUNDS = 10


async def link_busy() -> dict[str, Any]:
    """The pipeline as `bough demo` starts it, with a ring that holds what arrives while a tree is grown."""
    os.environ["BOUGH_TARGET_RING_MEMORY"] = "1GB"
    rounds: list[Tokens] = []
    async with launched(settings_from(UP_DEFAULTS), _quiet) as cluster, Client(cluster.address) as client:
        options = GenerateOptions(temperature=0.0, max_tokens=128, ignore_eos=True)
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
    """The pipeline in processes of its own for each speed of the link in bytes per second; 0 is as it comes.

    `memory` is what all of them may have together, page cache included; 0 is as much as they like.
    """
    results = {}
    for speed in speeds:
        drop_cached(model)
        with limited(memory, speed, model) as prefix:
            command = [*prefix, sys.executable, "-m", "loadtest.sweep_rounds"]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[speed] = json.loads(output.splitlines()[-1])
    return {
        "link_busy": round(results[max(speeds)]["link_busy"], 4) if max(speeds) else None,
        "link_busy_unlimited": round(results[0]["link_busy"], 4),
        "rounds": {f"{speed / 1e9} GB/s" if speed else "unlimited": figures for speed, figures in results.items()},
    }


def _quiet(_: str) -> None:
    """Instead of what the pipeline waits for."""


if __name__ == "__main__":
    print(json.dumps(asyncio.run(link_busy())))
