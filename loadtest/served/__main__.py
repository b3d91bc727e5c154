"""Tests of the served product under load: restarts, and a soak test.

    python -m loadtest.served
    python -m loadtest.served --parts soak --soak-seconds 600

Each part starts its own processes on this machine. Workers are simulated with round numbers of seconds, which leaves
bough's own cost as the measured part:

restarts        replace orchestrators, drafts and targets one after another under load: failed requests, other texts
soak            run minutes of load at a high rate: errors, latency early and late, growth of each process

Ends with one JSON line: each part's figures by its name, and

failed_requests all parts
unequal_texts   answers in `restarts` that differ from those of an undisturbed run
bad_exits       processes that `restarts` stopped and that ended with a status other than 0
leaks           what grew in `soak` by more than its limit
clients         concurrent clients in `restarts` and `soak`

The exit status is 1 if a request failed, a text differed, a process ended badly, or something leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bough.client import Client
from bough.config.flag_parser import FlagParser
from bough.errors import BoughError
from bough.protocol.generation import ChatPrompt, GenerateOptions, Message
from loadtest.common.streams import stream
from loadtest.served.soak import soak
from loadtest.served.stack import stack, write_profile

SWEEP_SECONDS = 0.1
ANSWER_TOKENS = 96
REPLICAS = 2
PAUSE_SECONDS = 1.0  # between restarts


async def answer(client: Client, number: int) -> list[int]:
    """The tokens of the request with this number."""
    prompt = ChatPrompt((Message("user", f"question {number}"),))
    options = GenerateOptions(seed=number, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    return (await stream(client, prompt, options)).token_ids


async def restarts(streams: int, num_prompts: int) -> dict[str, Any]:
    """Replace orchestrators, drafts and targets one after another under the load of `streams` clients."""
    failures: list[str] = []
    unequal = num_answers = 0
    is_over = asyncio.Event()
    with TemporaryDirectory() as folder:
        async with stack(write_profile(Path(folder), SWEEP_SECONDS), replicas=REPLICAS) as running:
            async with Client(*running.addresses("orchestrator")) as client:
                expected = [await answer(client, number) for number in range(num_prompts)]

            async def live(first: int) -> None:
                nonlocal unequal, num_answers
                number = first
                while not is_over.is_set():
                    addresses = running.addresses("orchestrator")  # as a service lookup returns them
                    async with Client(*addresses) as own:
                        try:
                            got = await answer(own, number % num_prompts)
                        except BoughError as exc:
                            failures.append(f"{type(exc).__name__}: {exc}")
                            continue
                    num_answers += 1
                    unequal += got != expected[number % num_prompts]
                    number += 1

            clients = [asyncio.create_task(live(first)) for first in range(streams)]
            began, statuses = time.monotonic(), []
            for kind in ("orchestrator", "draft", "target") * REPLICAS:
                await asyncio.sleep(PAUSE_SECONDS)
                await running.add(kind)
                statuses.append(await running.retire(kind))
            await asyncio.sleep(PAUSE_SECONDS)
            is_over.set()
            await asyncio.gather(*clients)
    return {
        "restarted": len(statuses),
        "exit_statuses": sorted(set(statuses)),
        "bad_exits": sum(status != 0 for status in statuses),  # processes that did not end with status 0
        "answers": num_answers,
        "failed": len(failures),
        "failures": sorted(set(failures))[:5],
        "unequal": unequal,
        "seconds": round(time.monotonic() - began, 1),
    }


PARTS = ("restarts", "soak")


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the parts; returns their figures by name."""
    parts = {
        "restarts": lambda: restarts(arguments.clients, num_prompts=16),
        "soak": lambda: soak(arguments.soak_seconds, arguments.clients),
    }
    figures: dict[str, Any] = {}
    for name in arguments.parts:
        _report(f"{name} ...")
        figures[name] = await parts[name]()
        _report(f"{name}: {json.dumps(figures[name])}")
    machine = {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    return {**verdict(figures), "clients": arguments.clients, **figures, **machine, "settings": vars(arguments)}


def verdict(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Summarise the figures by part; some parts may be missing."""
    return {
        "failed_requests": sum(figures.get("failed", 0) for figures in parts.values()),
        "unequal_texts": sum(figures.get("unequal", 0) for figures in parts.values()),
        "bad_exits": sum(figures.get("bad_exits", 0) for figures in parts.values()),
        "leaks": parts.get("soak", {}).get("leaks", []),
    }


def has_failed(figures: Mapping[str, Any]) -> bool:
    """Whether something failed that must not fail even on a slow machine."""
    return any(figures[name] for name in ("failed_requests", "unequal_texts", "bad_exits", "leaks"))


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Print progress, and one JSON line."""
    parser = FlagParser(description=__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    add("--clients", type=int, default=16, help="restarts, soak: concurrent clients")
    add("--soak-seconds", type=float, default=600.0)
    try:
        figures = asyncio.run(run(parser.parse_args()))
    except BoughError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    print(json.dumps(figures))
    return int(has_failed(figures))


if __name__ == "__main__":
    raise SystemExit(main())
