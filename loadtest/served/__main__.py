"""The served product end to end: what doors cost, how many streams are carried, overload, restarts, a soak.

    python -m loadtest.served
    python -m loadtest.served --parts doors carrying
    python -m loadtest.served --parts soak --soak-seconds 600

Parts, each on processes of its own on this machine. All but `demonstration` have simulated workers, whose seconds are
round numbers, so that what is measured is bough's own. Ends with one JSON line:

doors           gRPC beside the HTTP door, sweeps of 50 ms, each request through both, in an order that is drawn:
                `added_ttft_ms`, `added_chunk_ms` (medians), `ttft_ratio`, `tpot_ratio` (geometric means)
demonstration   the same on the 2 GB demonstration model
carrying        streams on sweeps of one second until the event loop's p99 lag passes 50 ms, with one orchestrator and
                with two; the load comes from the same machine
overload        five times as many requests as are served at the peak: `goodput_ratio` (under overload / peak), how
                soon the rest is refused, and with what delay
restarts        orchestrators, drafts and targets replaced one after another under load: failed requests, other texts
soak            minutes at a high rate: errors, latency early and late, growth of each process by figure
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bough.launch import launched
from loadtest.prompts import load_prompts
from loadtest.served.carrying import carry
from loadtest.served.doors import DIRECT, compare_doors, door_figures
from loadtest.served.overload import overload
from loadtest.served.profiles import write_profile
from loadtest.served.restarts import restarts
from loadtest.served.soak import soak
from loadtest.served.stack import stack
from loadtest.served.streams import Ask, Door, GrpcDoor, HttpDoor
from loadtest.stacks import http_url_of, stack_settings

PARTS = ("doors", "demonstration", "carrying", "overload", "restarts", "soak")
SWEEP_SECONDS = 0.05  # of `doors`


async def between_doors(address: str, arguments: argparse.Namespace, asks: Sequence[Ask]) -> dict[str, Any]:
    """What HTTP adds at one orchestrator, and what other URLs add that lead to the same one."""
    grpc_door, http_door = GrpcDoor(address), HttpDoor(await http_url_of(address))
    doors: dict[str, Door] = {DIRECT: grpc_door, "http": http_door}
    try:
        return door_figures(await compare_doors(doors, asks, arguments.seed))
    finally:
        await grpc_door.close()
        await http_door.close()


async def doors(arguments: argparse.Namespace) -> dict[str, Any]:
    """On simulated workers."""
    asks = [Ask(f"question {number}", 32, seed=number) for number in range(arguments.requests)]
    with TemporaryDirectory() as folder:
        async with stack(write_profile(Path(folder), SWEEP_SECONDS)) as running:
            return await between_doors(running.addresses("orchestrator")[0], arguments, asks)


async def demonstration(arguments: argparse.Namespace) -> dict[str, Any]:
    """On the demonstration models."""
    asks = [Ask(text, 24) for text in load_prompts()[: arguments.prompts]]
    async with launched(stack_settings(), lambda _: None) as cluster:
        return await between_doors(cluster.address, arguments, asks)


async def carrying(arguments: argparse.Namespace) -> dict[str, Any]:
    """One orchestrator, then two."""
    seconds = arguments.carry_seconds
    return {
        "one": await carry(arguments.streams, 1.0, seconds, replicas=1),
        "two": await carry(arguments.streams, 1.0, seconds, replicas=2),
    }


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures by part."""
    parts = {
        "doors": lambda: doors(arguments),
        "demonstration": lambda: demonstration(arguments),
        "carrying": lambda: carrying(arguments),
        "overload": lambda: overload(arguments.overload_seconds, arguments.seed),
        "restarts": lambda: restarts(arguments.clients, num_prompts=16),
        "soak": lambda: soak(arguments.soak_seconds, arguments.clients),
    }
    figures: dict[str, Any] = {}
    for name in arguments.parts:
        _report(f"{name} ...")
        figures[name] = await parts[name]()
        _report(f"{name}: {json.dumps(figures[name])}")
    machine = {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    return {**figures, **machine, "settings": vars(arguments)}


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Prints progress, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    add("--requests", type=int, default=100, help="doors: through each of them")
    add("--prompts", type=int, default=6, help="demonstration: through each door")
    add("--streams", nargs="+", type=int, default=[50, 100, 200, 300, 400], help="carrying: at once, ascending")
    add("--carry-seconds", type=float, default=20.0, help="carrying: of each number")
    add("--overload-seconds", type=float, default=20.0, help="overload: of the peak, and of the overload")
    add("--clients", type=int, default=16, help="restarts, soak: who ask at once")
    add("--soak-seconds", type=float, default=600.0)
    add("--seed", type=int, default=1)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
