"""Sends malformed messages, and checks that nothing crashes, hangs or leaks, and that valid requests are still exact.

    python -m loadtest.fuzz --messages 1000000 --seed 1
    python -m loadtest.fuzz --messages 1000000 --sockets 1 --minutes 10
    python -m loadtest.fuzz --messages 100000 --sockets 1 --tls

Starts an index, an orchestrator and simulated workers of its own. A share of the messages goes over real sockets to
both of the orchestrator's doors, many on a connection: bodies, heads, chunks that end half-way, protobufs, frames of
HTTP/2; a tenth of it are protobufs to the workers, and a twentieth bytes of other protocols to all ports, the index's
too, and with --tls that of one behind TLS. The rest is given to everything that decodes, in this process: what doors,
workers' services and the index read.
Prints progress on standard error and ends with one JSON line, and exit status 1 where something is wrong:

messages        all of them; `layers` has how many each layer got: `http`, `grpc`, `http2 frames`, `other protocols`,
                `target` and `draft` are real sockets
distinct        how many differed; frames that were sent at once count as one
problems        what should not have been, with how often: no status in time, status 500, INTERNAL or UNKNOWN, an
                error that is none of bough's own or is as long as its message, a process that has ended, an error in a
                log, a record in the index that does not expire; none is right
examples        of their messages
answers         by layer and status
growth          of the orchestrator and the workers from a tenth of the messages on: memory, descriptors, threads, tasks
memory          of the same, from a quarter of the messages on, at moments without work, garbage collected, freed memory
                given back: bytes in use by Python's objects, by malloc, by both (`live_bytes`), and resident, each
                with its lowest, median and highest growth a message between moments half of that time apart; where
                those in use grow it is a leak, where only the resident ones do it is space between them
exact           whether the ordinary request gave the same tokens as before, over both doors
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bough.config.flag_parser import FlagParser
from loadtest.fuzz.decoding import all_layers, problem_of
from loadtest.fuzz.mutation import Mutator
from loadtest.fuzz.outcomes import Outcomes
from loadtest.fuzz.sockets import Figures, at_sockets

SOCKET_SHARE = 0.15
TOLD_EVERY = 50_000
MAX_SECONDS = 5.0  # limit for decoding one message in this process, on a busy machine


def in_process(num_messages: int, seed: int) -> Outcomes:
    """Send messages to all layers in turn, in this process."""
    outcomes, mutator, layers = Outcomes(), Mutator(seed), all_layers()
    for number in range(num_messages):
        layer = layers[number % len(layers)]
        data = layer.make(mutator)
        began = time.process_time()
        problem = problem_of(layer, data)
        if not problem and time.process_time() - began > MAX_SECONDS:
            problem = f"{layer.name}: a message took more than {MAX_SECONDS:g} s of the processor"
        if problem:
            outcomes.failed(layer.name, problem, data)
        else:
            outcomes.answered(layer.name, "read or refused", data)
        if number % TOLD_EVERY == TOLD_EVERY - 1:
            _report(f"{number + 1} in this process, {outcomes.num_problems} problems")
    return outcomes


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Send all messages; returns the figures."""
    num_sent = round(arguments.messages * arguments.sockets)
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        most_seconds = 60 * arguments.minutes
        figures = Figures()
        if num_sent:
            figures = await at_sockets(
                Path(folder), num_sent, arguments.seed, _report, most_seconds, has_tls=arguments.tls
            )
    outcomes = figures.outcomes
    outcomes.add(in_process(arguments.messages - num_sent, arguments.seed))
    return {
        "messages": outcomes.num_messages,
        "distinct": len(outcomes.distinct),
        "problems": dict(outcomes.problems.most_common(50)),
        "exact": figures.is_exact,
        "growth": figures.growth,
        "memory": figures.memory,
        "layers": dict(outcomes.counts),
        "answers": dict(sorted(outcomes.answers.items())),
        "examples": outcomes.examples,
        "seconds": round(time.monotonic() - began, 1),
        "seed": arguments.seed,
        "cores": os.cpu_count(),
    }


def is_well(figures: dict[str, Any]) -> bool:
    """Whether the figures contain no problem."""
    return not figures["problems"] and figures["exact"]


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Print one JSON line."""
    parser = FlagParser(description=__doc__)
    add = parser.add_argument
    add("--messages", type=int, default=1_000_000)
    add("--sockets", type=float, default=SOCKET_SHARE, help="share of them that goes over real sockets")
    add("--minutes", type=float, default=math.inf, help="after which no more go over sockets")
    add("--tls", action="store_true", help="the orchestrator and the workers speak nothing but TLS")
    add("--seed", type=int, default=1)
    figures = asyncio.run(run(parser.parse_args()))
    print(json.dumps(figures))
    return 0 if is_well(figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
