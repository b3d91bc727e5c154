"""How long each operation of the index takes, on loopback: no round may have to wait for it.

    python -m loadtest.index

Starts the Valkey server that bough carries, unless --index-url names another, and calls every operation many times,
one call after another, with --workers workers and a session of --tokens tokens. Ends with one JSON line: milliseconds,
median and 99th percentile, of each operation (`record_session_whole` is the first record after a flush), and records
per second of 64 sessions at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bough.config.processes import OrchestratorConfig, TargetConfig, parse
from bough.processes.launch import Cluster, Settings
from bough.protocol.prefix_hash import block_hashes
from bough.protocol.sampling_params import SamplingParams, StopConditions
from bough.registry.records import RequestRecord, SessionRecord, WorkerLoad, WorkerRecord
from bough.registry.registry import Registry

NAMESPACE = "bough-loadtest"
NUM_SESSIONS = 64
NEW_TOKENS = 5  # of a round


@asynccontextmanager
async def index(url: str) -> AsyncIterator[Registry]:
    """A client of the index at a URL, or of one of our own where that is empty."""
    nothing = Settings(parse(TargetConfig, "t", ["--model", "x"], {}), None, parse(OrchestratorConfig, "o", [], {}))
    with tempfile.TemporaryDirectory(prefix="bough-") as folder:
        cluster = Cluster(nothing, Path(folder))
        try:
            if not url:
                cluster.start_index()
            registry = Registry(url or cluster.index_url, NAMESPACE)
            await registry.wait()
            yield registry
            await registry.close()
        finally:
            cluster.stop_all()


async def measured(call: Callable[[int], Awaitable[Any]], num_calls: int) -> dict[str, float]:
    """Milliseconds of a call, which is given its number."""
    seconds = []
    for number in range(num_calls):
        began = time.perf_counter()
        await call(number)
        seconds.append(time.perf_counter() - began)
    median, tail = np.percentile(seconds, (50, 99)) * 1e3
    return {"median": round(float(median), 3), "p99": round(float(tail), 3)}


class Calls:
    """Every operation, as a round or a heartbeat makes it."""

    def __init__(self, registry: Registry, num_tokens: int, num_workers: int) -> None:
        self._registry = registry
        self.tokens = tuple(range(num_tokens))
        self._hashes = block_hashes(self.tokens)
        self.workers = [
            WorkerRecord("target", f"t{i}", "127.0.0.1:9", WorkerLoad(i, 2**31, 2**20, (0.9, 1.0, 1.2)))
            for i in range(num_workers)
        ]

    @property
    def worker_ids(self) -> list[str]:
        return [worker.worker_id for worker in self.workers]

    def session(self, number: int, epoch: int) -> SessionRecord:
        """One that has held all but the last tokens."""
        return SessionRecord(f"s{number}", "t0", "d0", epoch, len(self.tokens) - 1, 0, self.tokens)

    def operations(self) -> dict[str, Callable[[int], Awaitable[Any]]]:
        """By name, each of which may be called any number of times after those before it."""
        registry, known = self._registry, len(self.tokens) - NEW_TOKENS
        request = RequestRecord("r", "s0", 2**52, 10, self.tokens, SamplingParams(), StopConditions())
        return {
            "register": lambda number: registry.register(self.workers[number % len(self.workers)], lease_seconds=600),
            "workers": lambda _: registry.workers(),
            "sweep_expired": lambda _: registry.sweep_expired(),
            "claim_session": lambda _: registry.claim_session("s", "me"),
            "record_session_whole": lambda number: registry.record_session(self.session(0, number + 1), 0),
            "record_session": lambda _: registry.record_session(self.session(0, 2**51), known),
            "record_request": lambda _: registry.record_request(request, known),
            "load_session": lambda _: registry.load_session("s0"),
            "note_prefixes": lambda number: registry.note_prefixes("m", self._hashes, f"t{number % len(self.workers)}"),
            "note_one_more_prefix": lambda number: registry.note_prefixes(
                "m", self._hashes, f"t{number % len(self.workers)}", len(self._hashes) - 1
            ),
            "find_prefixes": lambda _: registry.find_prefixes("m", self._hashes, self.worker_ids),
            "find_prefixes_of_nobody": lambda _: registry.find_prefixes("other", self._hashes, self.worker_ids),
            "drop_session": lambda _: registry.drop_session("s0", 2**51),
        }

    async def sessions_at_once(self, num_rounds: int) -> float:
        """Records per second of so many sessions, each of which waits for its own."""

        async def rounds(number: int) -> None:
            for length in range(len(self.tokens) - num_rounds, len(self.tokens)):
                record = replace(self.session(number, 2**51), tokens=self.tokens[:length])
                await self._registry.record_session(record, length - 1)

        began = time.perf_counter()
        await asyncio.gather(*(rounds(number) for number in range(NUM_SESSIONS)))
        return NUM_SESSIONS * num_rounds / (time.perf_counter() - began)

    async def clean(self) -> None:
        """Takes out what was put in, but for what ends by itself."""
        for number in range(NUM_SESSIONS):
            await self._registry.close_session(f"s{number}")
        for worker in self.workers:
            await self._registry.deregister(worker.worker_id)


async def main() -> None:
    """Prints a line for each operation, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index-url", default="", help="a server that is there already")
    parser.add_argument("--tokens", type=int, default=2048, help="of a session")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--calls", type=int, default=500, help="of each operation")
    arguments = parser.parse_args()
    async with index(arguments.index_url) as registry:
        calls = Calls(registry, arguments.tokens, arguments.workers)
        figures = {}
        for name, call in calls.operations().items():
            figures[name] = await measured(call, arguments.calls)
            print(f"{name:>22}: {figures[name]['median']:.3f} ms, 99th {figures[name]['p99']:.3f} ms", file=sys.stderr)
        per_second = await calls.sessions_at_once(min(50, arguments.tokens // 2))
        await calls.clean()
    sizes = {"tokens": arguments.tokens, "workers": arguments.workers, "calls": arguments.calls}
    print(json.dumps({**sizes, "milliseconds": figures, "records_per_second_of_64_sessions": round(per_second)}))


if __name__ == "__main__":
    asyncio.run(main())
