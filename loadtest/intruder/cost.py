"""Measures the cost of keys and certificates: time per token with both and with neither, request by request.

    python -m loadtest.intruder.cost --requests 60
    python -m loadtest.intruder.cost --demonstration --launches 4 --requests 100 --minutes 7

Two boughs of this machine, one of which has keys, a secret among processes, and TLS everywhere with certificates of
clients; each request goes to both, one after another, in an order that is drawn. Trees have one size, so that the
rounds of a request are the same in both, and each is compared with its like. Two processes differ by where their memory
lies, too, so `--launches` starts all of them anew, the other bough first, and `--control` gives neither bough keys:
what then differs is the measurement's own. Ends with one JSON line:

ratio           time per token with keys and TLS over that without: geometric mean over requests, with a 95 % interval
round_ratio     time of a round over that of the same round in the other: median over rounds, with a 95 % interval, for
                which requests are drawn with all their rounds; a disk that stalls moves it less than a mean
processor       for each kind of process its milliseconds of a processor a token, with and without, and the difference
                in percent of the time per token, with a 95 % interval; what else runs on the machine hardly shows in it
token_seconds   means of both
launches        round_ratio of each launch
unequal         requests for which the two gave different tokens; none is right
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bough.client import Client
from bough.config.flag_parser import FlagParser
from bough.processes.launch import Cluster, launched
from bough.protocol.generation import ChatPrompt, GenerateOptions, Message, Speculation, Tokens
from bough.security.api_keys import new_key
from bough.security.private_files import write_private
from loadtest.common.certificates import Authority, flags_of
from loadtest.common.prompts import load_prompts
from loadtest.common.ratios import interval, ratio
from loadtest.common.stacks import stack_settings
from loadtest.intruder.stage import new_secrets, write_keys
from loadtest.served.profiles import write_profile

SWEEP_SECONDS = 0.05
SPECULATION = Speculation(budget=8, width=4, depth=4, lookup=0)
KINDS = ("orchestrator", "target_worker", "draft_worker")


class Answered(NamedTuple):
    """An answer: its tokens by round, the seconds of all rounds but the first, and processor seconds by process."""

    rounds: tuple[tuple[int, ...], ...]
    round_seconds: tuple[float, ...]
    processor: dict[str, float]

    @property
    def num_timed(self) -> int:
        """The number of tokens of the timed rounds."""
        return max(1, sum(map(len, self.rounds[1:])))

    @property
    def token_seconds(self) -> float:
        """Seconds per token after the first round."""
        return sum(self.round_seconds) / self.num_timed


class Side(NamedTuple):
    """One of the two boughs."""

    cluster: Cluster
    client: Client

    def processor_seconds(self) -> dict[str, float]:
        """Processor seconds of each kind of process since its start, threads that have ended included."""
        # Linux makes a process's clock from its id so (MAKE_PROCESS_CPUCLOCK, CPUCLOCK_SCHED)
        return {kind: time.clock_gettime((~self.cluster.children[kind].process.pid << 3) | 2) for kind in KINDS}


async def ask(side: Side, text: str, max_tokens: int) -> Answered:
    """Send a request and read the whole answer."""
    options = GenerateOptions(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, speculation=SPECULATION)
    rounds: list[tuple[int, ...]] = []
    moments: list[float] = []
    before: dict[str, float] = {}
    async for event in side.client.generate(ChatPrompt((Message("user", text),)), options):
        if isinstance(event, Tokens):
            before = before or side.processor_seconds()
            rounds.append(event.token_ids)
            moments.append(time.perf_counter())
    used = {kind: seconds - before[kind] for kind, seconds in side.processor_seconds().items()}
    seconds = tuple(after - earlier for earlier, after in pairwise(moments))
    return Answered(tuple(rounds), seconds, used)


@asynccontextmanager
async def guarded(folder: Path, profile: str) -> AsyncIterator[Side]:
    """Processes with keys, a shared secret, and TLS with client certificates."""
    secrets, keys, worker_key = new_secrets(), folder / "keys.jsonl", folder / "worker.key"
    files = Authority().files(folder)
    write_keys(keys, secrets, with_removed=False)
    write_private("--worker-key-file", str(worker_key), new_key())
    of_doors = ["--keys", str(keys), "--tls-client-ca", files.authority]
    settings = stack_settings(profile, of_doors, ["--worker-key-file", str(worker_key), *flags_of(files)])
    async with (
        launched(settings, lambda _: None) as cluster,
        Client(cluster.address, api_key=secrets.alice, certificates=files) as client,
    ):
        yield Side(cluster, client)


@asynccontextmanager
async def open_to_all(profile: str) -> AsyncIterator[Side]:
    """Processes without keys and without TLS."""
    async with launched(stack_settings(profile), lambda _: None) as cluster, Client(cluster.address) as client:
        yield Side(cluster, client)


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the figures."""
    launches = [await _launch(number, arguments) for number in range(arguments.launches)]
    pairs = list(chain.from_iterable(launches))
    return {
        **figures(pairs, arguments.seed),
        "launches": [figures(each, arguments.seed)["round_ratio"]["median"] for each in launches],
        "requests": len(pairs),
        "keys": "in neither" if arguments.control else "in one of the two",
        "workers": "demonstration" if arguments.demonstration else f"simulated, sweeps of {SWEEP_SECONDS:g} s",
        "cores": os.cpu_count(),
    }


async def _launch(number: int, arguments: argparse.Namespace) -> list[tuple[Answered, Answered]]:
    """Start both boughs, in the other order at every second launch, and ask both."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bough-cost-")))
        profile = "" if arguments.demonstration else str(write_profile(folder, SWEEP_SECONDS))
        with_keys = open_to_all(profile) if arguments.control else guarded(folder, profile)
        starts = [with_keys, open_to_all(profile)]
        order = (0, 1) if number % 2 else (1, 0)
        sides = {place: await stack.enter_async_context(starts[place]) for place in order}
        return await _pairs(sides[0], sides[1], arguments, number * arguments.requests)


async def _pairs(
    with_keys: Side, without: Side, arguments: argparse.Namespace, first_text: int
) -> list[tuple[Answered, Answered]]:
    """Each request's answers, with keys and without, until all are had or the time is over."""
    rng, texts, pairs = random.Random(arguments.seed + first_text), load_prompts(), []
    ends = time.monotonic() + 60 * arguments.minutes
    for number in range(arguments.requests + 1):
        if number > 1 and time.monotonic() > ends:
            break
        answers = {}
        for side in rng.sample([with_keys, without], 2):
            answers[side] = await ask(side, texts[(first_text + number) % len(texts)], arguments.answer_tokens)
        if number:  # the first request is a warm-up
            pairs.append((answers[with_keys], answers[without]))
        print(f"{number} of {arguments.requests}", file=sys.stderr, flush=True)
    return pairs


def figures(pairs: Sequence[tuple[Answered, Answered]], seed: int) -> dict[str, Any]:
    """The figures of answers with keys and without."""
    seconds = [[each.token_seconds for each in side] for side in zip(*pairs, strict=True)]
    alike = [
        [a / b for a, b in zip(guarded.round_seconds, plain.round_seconds, strict=True)]
        for guarded, plain in pairs
        if guarded.rounds == plain.rounds and guarded.round_seconds
    ]
    return {
        "ratio": ratio(seconds[0], seconds[1], seed, 4),
        "round_ratio": {
            "median": round(_median_of_all(alike), 4),
            "interval": interval(alike, _median_of_all, seed, 4),
            "rounds": sum(map(len, alike)),
        },
        "processor": {kind: _processor(pairs, kind, seed) for kind in KINDS},
        "token_seconds": {"guarded": round(fmean(seconds[0]), 5), "open": round(fmean(seconds[1]), 5)},
        "unequal": sum(sum(a.rounds, ()) != sum(b.rounds, ()) for a, b in pairs),
    }


def _median_of_all(requests: Sequence[Sequence[float]]) -> float:
    return median(chain.from_iterable(requests))


def _processor(pairs: Sequence[tuple[Answered, Answered]], kind: str, seed: int) -> dict[str, Any]:
    """Processor milliseconds a token of a kind of process with keys and without, and their difference's share."""
    each = [[answer.processor[kind] / answer.num_timed for answer in side] for side in zip(*pairs, strict=True)]
    token_seconds = fmean(plain.token_seconds for _, plain in pairs)
    shares = [100 * (guarded - plain) / token_seconds for guarded, plain in zip(*each, strict=True)]
    return {
        "guarded_ms": round(1000 * fmean(each[0]), 3),
        "open_ms": round(1000 * fmean(each[1]), 3),
        "percent": round(fmean(shares), 3),
        "interval": interval(shares, fmean, seed),
    }


def main() -> int:
    """Print progress, and one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=40, help="through each of the two, a launch")
    parser.add_argument("--minutes", type=float, default=60.0, help="of a launch, after which no request is begun")
    parser.add_argument("--launches", type=int, default=1, help="times that all processes are started")
    parser.add_argument("--control", action="store_true", help="neither has keys")
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--demonstration", action="store_true", help="the demonstration models, not simulated workers")
    parser.add_argument("--seed", type=int, default=1)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
