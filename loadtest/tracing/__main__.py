"""Measures the cost of tracing: three systems with simulated workers, which differ only in tracing, in turns.

    python -m loadtest.tracing
    python -m loadtest.tracing --requests 10 --sweep-seconds 0.2

`off` traces nothing, `on` sends every span to a collector in this process, `away` to one that is not there. Each
request goes to all three, in an order that is drawn. Ends with one JSON line:

on, away                `tpot_ratio`, `ttft_ratio` (over `off`: geometric mean, 95 % interval), `added_ttft_ms`,
                        `added_chunk_ms` (a chunk is a round)
off_token_seconds       median without traces
cpu_ms_per_round        by bough and process: processor time over rounds
bytes_per_round         that came to the collector
failed, unequal         requests that failed; that had not the same text everywhere
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc

from bough.config.flag_parser import FlagParser
from bough.processes.launch import Cluster, Settings, launched
from loadtest.common.machine import processor
from loadtest.common.stacks import stack_settings
from loadtest.served.doors import DIRECT, Comparison, door_figures
from loadtest.served.profiles import write_profile
from loadtest.served.streams import Answered, Ask, GrpcDoor

PROCESSES = ("orchestrator", "draft_worker", "target_worker")
AWAY = "http://127.0.0.1:1"
ANSWER_TOKENS = 64


@dataclass(slots=True)
class Sink(grpc.GenericRpcHandler):
    """A collector that counts bytes and keeps nothing; its empty answer is valid."""

    num_bytes: int = 0

    def service(self, handler_call_details: Any) -> Any:
        """Accept every export."""
        return grpc.unary_unary_rpc_method_handler(self._export)

    async def _export(self, request: bytes, context: Any) -> bytes:
        self.num_bytes += len(request)
        return b""


@dataclass(slots=True)
class Watched:
    """A system, its client, and the processor time and rounds of its requests so far."""

    cluster: Cluster
    door: GrpcDoor
    num_rounds: int = 0

    async def __call__(self, ask: Ask) -> Answered:
        """Make a request, and count its rounds."""
        answered = await self.door(ask)
        self.num_rounds += answered.num_events
        return answered

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time of each process since its start."""
        return {name: cpu_seconds(self.cluster.children[name].process.pid) for name in PROCESSES}


def cpu_seconds(process_id: int) -> float:
    """Fields 14 and 15 of proc(5): user and system time."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def watched(profile: Path, endpoint: str) -> AsyncIterator[Watched]:
    """Run a system whose processes trace to `endpoint`, or not at all if that is empty."""
    settings = stack_settings(str(profile))
    assert settings.draft is not None
    traced = Settings(
        replace(settings.target, otlp_endpoint=endpoint),
        replace(settings.draft, otlp_endpoint=endpoint),
        replace(settings.orchestrator, otlp_endpoint=endpoint),
    )
    async with launched(traced, lambda _: None) as up:
        door = GrpcDoor(up.address)
        try:
            yield Watched(up, door)
        finally:
            await door.close()


async def asked_in_turn(boughs: Mapping[str, Watched], asks: Sequence[Ask], seed: int) -> Comparison:
    """Send each request to all systems, so that background work is the same for each."""
    rng, found = random.Random(seed), Comparison({name: [] for name in boughs})
    for ask in asks:
        answered = {name: await boughs[name](ask) for name in rng.sample([*boughs], len(boughs))}
        failures = [f"{name}: {each.sample.error}" for name, each in answered.items() if each.sample.error]
        found.failures += failures
        if failures:
            continue
        found.num_unequal += len({each.text for each in answered.values()}) > 1
        for name, each in answered.items():
            found.answers[name].append(each)
    return found


async def measured(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure and return all figures."""
    sink, profile = Sink(), write_profile(folder, arguments.sweep_seconds)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((sink,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, None)
        boughs = {
            name: await stack.enter_async_context(watched(profile, endpoint))
            for name, endpoint in ((DIRECT, ""), ("on", f"http://127.0.0.1:{port}"), ("away", AWAY))
        }
        asks = [Ask(f"Question {number}", ANSWER_TOKENS, seed=number) for number in range(arguments.requests)]
        for bough in boughs.values():  # warm-up
            await bough(asks[0])
            bough.num_rounds = 0
        before = {name: bough.cpu_seconds() for name, bough in boughs.items()}
        sent = sink.num_bytes
        found = await asked_in_turn(boughs, asks, arguments.seed)
        await asyncio.sleep(arguments.settle_seconds)  # for the last batch of spans
        figures = door_figures(found, arguments.seed)
        cpu = {
            "off" if name == DIRECT else name: {
                process: round(1e3 * (seconds - before[name][process]) / bough.num_rounds, 2)
                for process, seconds in bough.cpu_seconds().items()
            }
            for name, bough in boughs.items()
        }
        return {
            "on": figures["on"],
            "away": figures["away"],
            "off_token_seconds": figures["grpc_token_seconds"],
            "cpu_ms_per_round": cpu,
            "bytes_per_round": round((sink.num_bytes - sent) / boughs["on"].num_rounds),
            "failed": figures["failed"],
            "unequal": figures["unequal"],
            "requests": figures["requests"],
        }


def main() -> None:
    """Parse the arguments, measure, and print one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=40, help="asked of each bough (default 40)")
    parser.add_argument("--sweep-seconds", type=float, default=0.05, help="that a simulated sweep takes (default 0.05)")
    parser.add_argument("--seed", type=int, default=1, help="of the order (default 1)")
    parser.add_argument("--settle-seconds", type=float, default=6.0, help="for the last spans (default 6)")
    arguments = parser.parse_args()
    if arguments.requests < 1 or arguments.sweep_seconds <= 0:
        parser.error(
            f"--requests, --sweep-seconds: must be above 0, got {arguments.requests} and {arguments.sweep_seconds}"
        )
    with TemporaryDirectory(prefix="bough-tracing-") as folder:
        figures = asyncio.run(measured(arguments, Path(folder)))
    figures |= {"machine": f"{os.cpu_count()} x {processor()}", "python": platform.python_version()}
    print(json.dumps(figures))
    sys.exit(1 if figures["failed"] or figures["unequal"] else 0)


if __name__ == "__main__":
    main()
