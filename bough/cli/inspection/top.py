"""`bough top`: shows the current load, workers and latest rounds, refreshed periodically."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from bough.cli.flags.reaching import client_from, with_hint
from bough.client import Client
from bough.errors import BoughError, NotFound
from bough.protocol.decision import Decision
from bough.protocol.generation import Loads, ServerInfo, WorkerStatus
from bough.runtime.log_lines import say
from bough.sizing.account import PART_NAMES, why

CLEAR = "\x1b[H\x1b[2J"  # clears a terminal
NUM_ROUNDS = 8  # latest rounds shown


class Snapshot(NamedTuple):
    """A snapshot of everything that is shown."""

    at: float  # seconds on the monotonic clock
    server: ServerInfo
    loads: Loads
    decisions: tuple[Decision, ...]  # of the last active session


async def top(arguments: argparse.Namespace) -> int:
    """Show the load every `--interval` seconds, `--count` times or forever; exit status 1 if nothing answers."""
    before: Snapshot | None = None
    async with client_from(arguments) as client:
        number = 0
        while arguments.count == 0 or number < arguments.count:
            if number:
                await asyncio.sleep(arguments.interval)
            number += 1
            try:
                now = await _look(client)
            except BoughError as exc:
                say(with_hint(exc))
                if arguments.count:
                    return 1
                continue
            if sys.stdout.isatty():
                print(CLEAR, end="")
            say(*lines(client.address, now, before))
            before = now
    return 0


async def _look(client: Client) -> Snapshot:
    server, loads = await client.server_info(), await client.loads()
    try:
        decisions = await client.decisions()
    except NotFound:  # nothing has run yet
        decisions = ()
    return Snapshot(time.monotonic(), server, loads, decisions)


def lines(address: str, now: Snapshot, before: Snapshot | None) -> Iterator[str]:
    """The lines to show; rates are over the time since the snapshot `before`."""
    loads = now.loads
    rate = ""
    if before is not None and now.at > before.at:
        tokens = loads.num_tokens_total - before.loads.num_tokens_total
        rate = f", {tokens / (now.at - before.at):.1f} tokens/s"
    yield f"{address}: {loads.num_requests_running} running, {loads.num_requests_waiting} waiting{rate}"
    if now.server.index_problem:
        yield f"index: {now.server.index_problem}"
    yield ""
    yield f"{'':8}{'at':24}{'model':28}{'sessions':>9}{'KV':>6}{'waiting':>9}{'passes/s':>10}  state"
    passes = {one.info.worker_id: one.info.num_passes for one in before.server.workers} if before else {}
    for worker in now.server.workers:
        since = passes.get(worker.info.worker_id)
        seconds = now.at - before.at if before else 0.0
        per_second = f"{(worker.info.num_passes - since) / seconds:.2f}" if since is not None and seconds else ""
        yield _worker_line(worker, per_second)
    if now.decisions:
        yield ""
        parts = "".join(f"{name:>9}" for name in PART_NAMES)
        yield (
            f"{'round':>8}{'nodes':>7}{'accepted':>10}{'expected':>10}{'tokens':>8}"
            f"{'expected s':>12}{'seconds':>9} ={parts}  why"
        )
        for each in now.decisions[-NUM_ROUNDS:]:
            parts = "".join(f"{getattr(each.seconds, name):9.3f}" for name in PART_NAMES)
            yield (
                f"{each.number:8}{each.num_sent:7}{max(0, each.tokens - 1):10}{each.expected_tokens:10.2f}"
                f"{each.tokens:8}{each.expected.total:12.3f}{each.seconds.total:9.3f} ={parts}  {why(each)}"
            )


def _worker_line(worker: WorkerStatus, per_second: str) -> str:
    info = worker.info
    share = f"{info.kv_used_bytes / info.kv_bytes:.0%}" if info.kv_bytes else ""
    return (
        f"{info.kind:8}{worker.address:24}{info.model_name[:26]:28}{info.num_sessions:9}{share:>6}"
        f"{info.num_waiting:9}{per_second:>10}  {worker.problem or 'in use'}"
    )
