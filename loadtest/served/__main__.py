"""End-to-end tests of the served product: API overhead, capacity in streams, overload, restarts, and a soak test.

    python -m loadtest.served
    python -m loadtest.served --parts doors carrying
    python -m loadtest.served --parts doors --requests 10 --no-proxy
    python -m loadtest.served --parts demonstration --prompts 12 --answer-tokens 24 --repeats 2
    python -m loadtest.served --parts soak --soak-seconds 600
    python -m loadtest.served --parts second overload

Parts, each on processes of its own on this machine. All but `demonstration` have simulated workers, whose seconds are
round numbers, so that what is measured is bough's own:

doors           gRPC straight to an orchestrator beside that orchestrator's own HTTP port (`http`) and Ray Serve's HTTP
                proxy (`proxy`), sweeps of 50 ms, each request through all of them, in an order that is drawn:
                `ttft_ratio`, `tpot_ratio` (geometric means over requests, with 95 % intervals), `added_ttft_ms`,
                `added_chunk_ms` (medians, with theirs). Ray Serve is started as `make serve` does; --no-proxy leaves
                it out
demonstration   the same on the 2 GB demonstration model
carrying        streams on sweeps of one second until the event loop's p99 lag passes 50 ms, with trees; and without, so
                that no draft is at work beside; the load comes from the same machine
second          one orchestrator beside two, all five times slower and each on a fifth of a core, so that orchestrators
                are what bends first (root): `bent_at_streams`; `rounds_ratios`, of two over one at each number
overload        rates of requests over both APIs climb to the peak of goodput under an objective, and then come five
                times as many: `goodput_ratio` (under overload / peak), how soon the rest is refused, with what delay
restarts        orchestrators, drafts and targets replaced one after another under load: failed requests, other texts
soak            minutes at a high rate: errors, latency early and late, growth of each process by figure

Ends with one JSON line: each part's figures by its name, and

ttft_ratio      by door, over direct gRPC: `geomean`, `interval`; `of` says which part they are from: `demonstration`
tpot_ratio      where that was run, else `doors`; null where neither was
overload_goodput_ratio   of `overload`; null where that was not run
failed_requests of all parts; refusals under overload are none
unequal_texts   answers that were not what another door, or an undisturbed run, gave
bad_exits       processes that `restarts` asked to end and that ended with a status but 0
leaks           what grew in `soak` by more than it may
clients         who asked at once in `restarts` and `soak`

The exit status is 1 where a request failed, a text was another, a process ended badly, or something leaked.
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

from bough.config.flag_parser import FlagParser, checked
from bough.config.parsers import number
from bough.errors import BoughError
from bough.processes.launch import launched
from loadtest.common.prompts import load_prompts
from loadtest.common.stacks import http_url_of, stack_settings
from loadtest.served.carrying import carry
from loadtest.served.doors import DIRECT, compare_doors, door_figures
from loadtest.served.overload import overload
from loadtest.served.profiles import write_profile
from loadtest.served.restarts import restarts
from loadtest.served.second import second
from loadtest.served.soak import soak
from loadtest.served.stack import stack
from loadtest.served.streams import Ask, Door, GrpcDoor, HttpDoor
from loadtest.served.under_ray import Addresses, under_ray
from loadtest.served.verdict import has_failed, verdict

PARTS = ("doors", "demonstration", "carrying", "second", "overload", "restarts", "soak")
SWEEP_SECONDS = 0.05  # of the part `doors`


async def between_doors(addresses: Addresses, arguments: argparse.Namespace, asks: Sequence[Ask]) -> dict[str, Any]:
    """Measure what each API adds to direct gRPC, at one orchestrator."""
    grpc_door = GrpcDoor(addresses.grpc)
    urls = {"http": addresses.http, "proxy": addresses.proxy}
    http_doors = {name: HttpDoor(url, name) for name, url in urls.items() if url}
    doors: dict[str, Door] = {DIRECT: grpc_door, **http_doors}
    try:
        return door_figures(await compare_doors(doors, asks, arguments.seed), arguments.seed)
    finally:
        await grpc_door.close()
        for door in http_doors.values():
            await door.close()


async def doors(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare the APIs with simulated workers."""
    asks = [Ask(f"question {number}", 32, seed=number) for number in range(arguments.requests)]
    with TemporaryDirectory() as folder:
        profile = write_profile(Path(folder), SWEEP_SECONDS)
        if arguments.proxy:
            async with under_ray(profile) as addresses:
                return await between_doors(addresses, arguments, asks)
        async with stack(profile) as running:
            address = running.addresses("orchestrator")[0]
            return await between_doors(await without_proxy(address), arguments, asks)


async def demonstration(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare the APIs with the demonstration models."""
    prompts = load_prompts()[: arguments.prompts] * arguments.repeats
    asks = [Ask(text, arguments.answer_tokens) for text in prompts]
    if arguments.proxy:
        async with under_ray() as addresses:
            return await between_doors(addresses, arguments, asks)
    async with launched(stack_settings(), lambda _: None) as cluster:
        return await between_doors(await without_proxy(cluster.address), arguments, asks)


async def without_proxy(address: str) -> Addresses:
    """Addresses of an orchestrator without Ray Serve."""
    return Addresses(address, await http_url_of(address), "")


async def carrying(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the capacity of one orchestrator, with and without trees."""
    settings = arguments.streams, 1.0, arguments.carry_seconds
    return {
        "one": await carry(*settings, speculates=True),
        "one_without_trees": await carry(*settings, speculates=False),
    }


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the parts; returns their figures by name."""
    parts = {
        "doors": lambda: doors(arguments),
        "demonstration": lambda: demonstration(arguments),
        "carrying": lambda: carrying(arguments),
        "second": lambda: second(arguments.streams_each),
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
    return {**verdict(figures, arguments.clients), **figures, **machine, "settings": vars(arguments)}


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Print progress, and one JSON line."""
    parser = FlagParser(description=__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    add("--requests", type=int, default=100, help="doors: through each of them")
    add("--prompts", type=int, default=6, help="demonstration: through each door")
    add("--repeats", type=int, default=1, help="demonstration: of all prompts")
    add("--answer-tokens", type=int, default=24, help="demonstration: of each answer")
    add("--proxy", action=argparse.BooleanOptionalAction, default=True, help="doors, demonstration: through Serve too")
    add("--streams", nargs="+", type=int, default=[50, 100, 200, 300, 400], help="carrying: at once, ascending")
    add("--carry-seconds", type=float, default=20.0, help="carrying: of each number")
    add("--streams-each", nargs="+", type=int, default=[150, 250, 350], help="second: at each orchestrator, ascending")
    add("--overload-seconds", type=checked(number(float, 10.0)), default=20.0, help="overload: of each rate")
    add("--clients", type=int, default=16, help="restarts, soak: who ask at once")
    add("--soak-seconds", type=float, default=600.0)
    add("--seed", type=int, default=1)
    try:
        figures = asyncio.run(run(parser.parse_args()))
    except BoughError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    print(json.dumps(figures))
    return int(has_failed(figures))


if __name__ == "__main__":
    raise SystemExit(main())
