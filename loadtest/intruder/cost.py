"""Measures the cost of keys and certificates: time per token with both and with neither, request by request.

    python -m loadtest.intruder.cost --requests 60
    python -m loadtest.intruder.cost --demonstration --requests 8

Two boughs of this machine, one of which has keys, a secret among processes, and TLS everywhere with certificates of
clients; each request goes to both, one after another, in an order that is drawn. Ends with one JSON line:

ratio           time per token with keys and TLS over that without: geometric mean over requests, with a 95 % interval
token_seconds   means of both
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
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bough.client import Client
from bough.config.flag_parser import FlagParser
from bough.processes.launch import launched
from bough.protocol.generation import ChatPrompt, GenerateOptions, Message, Tokens
from bough.security.api_keys import new_key
from bough.security.private_files import write_private
from loadtest.common.certificates import Authority, flags_of
from loadtest.common.prompts import load_prompts
from loadtest.common.ratios import ratio
from loadtest.common.stacks import stack_settings
from loadtest.intruder.stage import new_secrets, write_keys
from loadtest.served.profiles import write_profile

SWEEP_SECONDS = 0.05


class Answered(NamedTuple):
    """An answer: its tokens, and seconds per token after the first round."""

    tokens: tuple[int, ...]
    token_seconds: float


async def ask(client: Client, text: str, max_tokens: int) -> Answered:
    """Send a request and read the whole answer."""
    options = GenerateOptions(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    tokens: list[int] = []
    began, num_first = 0.0, 0
    async for event in client.generate(ChatPrompt((Message("user", text),)), options):
        if isinstance(event, Tokens):
            if not tokens:
                began, num_first = time.perf_counter(), len(event.token_ids)
            tokens += event.token_ids
    return Answered(tuple(tokens), (time.perf_counter() - began) / max(1, len(tokens) - num_first))


@asynccontextmanager
async def guarded(folder: Path, profile: str) -> AsyncIterator[Client]:
    """A client of processes with keys, a shared secret, and TLS with client certificates."""
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
        yield client


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the figures."""
    rng, texts = random.Random(arguments.seed), load_prompts()
    sides: dict[str, list[Answered]] = {"open": [], "guarded": []}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bough-cost-")))
        profile = "" if arguments.demonstration else str(write_profile(folder, SWEEP_SECONDS))
        cluster = await stack.enter_async_context(launched(stack_settings(profile), lambda _: None))
        clients = {
            "open": await stack.enter_async_context(Client(cluster.address)),
            "guarded": await stack.enter_async_context(guarded(folder, profile)),
        }
        for number in range(arguments.requests + 1):
            text = texts[number % len(texts)]
            for name in rng.sample([*clients], len(clients)):
                answered = await ask(clients[name], text, arguments.answer_tokens)
                if number:  # the first request is a warm-up
                    sides[name].append(answered)
            print(f"{number} of {arguments.requests}", file=sys.stderr, flush=True)
    with_keys, without = sides["guarded"], sides["open"]
    seconds = [[each.token_seconds for each in side] for side in (with_keys, without)]
    return {
        "ratio": ratio(seconds[0], seconds[1], arguments.seed, 4),
        "token_seconds": {"guarded": round(fmean(seconds[0]), 5), "open": round(fmean(seconds[1]), 5)},
        "unequal": sum(a.tokens != b.tokens for a, b in zip(with_keys, without, strict=True)),
        "requests": arguments.requests,
        "workers": "demonstration" if arguments.demonstration else f"simulated, sweeps of {SWEEP_SECONDS:g} s",
        "cores": os.cpu_count(),
    }


def main() -> int:
    """Print progress, and one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=40, help="through each of the two")
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--demonstration", action="store_true", help="the demonstration models, not simulated workers")
    parser.add_argument("--seed", type=int, default=1)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
