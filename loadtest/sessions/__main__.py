"""Measures the throughput of many sessions on one offloaded target, compared with the same prompts alone.

    python -m loadtest.sessions
    python -m loadtest.sessions --sessions 1 2 4 8 --prompts-each 3
    python -m loadtest.sessions --simulate two-cores --orchestrator-flags "--planner fixed" --rounds ROUNDS.json
    python -m loadtest.capacity --sessions ROUNDS.json

The target is the demonstration's of 2 GB with no layer in memory, unless --model names another or --simulate a profile
of simulated workers. Trees size themselves unless --orchestrator-flags set a size, which loadtest.capacity needs. Each
repeat runs every number of sessions once in random order, and some of the prompts alone between them. Ends with one
JSON line:

throughput_ratio    by number of sessions: tokens per second of all together / of the same prompts alone; quartiles over
                    the repeats. Reading the prompts and waiting for the last session count; more --prompts-each make
                    the end count less. `steady_ratio`: only while all sessions were running
unequal_streams     streams whose tokens differ from those of the same prompt alone
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bough.client import Client
from bough.config.cache_paths import SUBSTITUTE_DROPS, demonstration_folder
from bough.config.flag_parser import FlagParser
from bough.model.checkpoint.model_places import load_tokenizer_files
from bough.processes.demonstration import ensure_demonstration
from bough.processes.launch import Settings, launched
from bough.protocol.generation import GenerateOptions, TokenPrompt
from bough.simulation.tokenizer import simulated_tokenizer
from bough.tokenization.tokenizer import Tokenizer
from loadtest.chaos.streams import Answer, Tally
from loadtest.common.prompts import load_prompts
from loadtest.common.stacks import settings_of
from loadtest.common.tiny_model import save_model
from loadtest.sessions.rounds_file import write_runs
from loadtest.sessions.runs import Together, together


class Bench:
    """Settings of the target, and all measurements with them."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer, arguments: argparse.Namespace) -> None:
        self.settings = settings
        self.alone: dict[int, Together] = {}  # by prompt number
        self.groups: list[Together] = []
        self._arguments = arguments
        texts = load_prompts()
        num_prompts = max(arguments.sessions) * arguments.prompts_each
        prompts = [tokenizer.encode_chat([("user", text)]) for text in texts[:num_prompts]]
        self._prompts = [TokenPrompt(tuple(prompt)) for prompt in prompts]
        self._options = GenerateOptions(temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=True)

    async def repeat(self, number: int, rng: random.Random) -> None:
        """Measure everything once with new processes, and a share of the prompts alone."""
        share = range(number, len(self._prompts), self._arguments.repeats)
        each = self._arguments.prompts_each
        groups = [(num, range(num * each)) for num in self._arguments.sessions if num > 1]
        runs = [*groups, *((1, (number,)) for number in share)]
        rng.shuffle(runs)
        async with launched(self.settings, lambda _: None) as cluster, Client(cluster.address) as client:
            await together(client, 1, (0,), self._prompts, GenerateOptions(temperature=0.0, max_tokens=8))  # warm-up
            for num_sessions, numbers in runs:
                done = await together(client, num_sessions, numbers, self._prompts, self._options)
                if num_sessions == 1:
                    self.alone[numbers[0]] = done
                else:
                    self.groups.append(done)
                rate = done.num_tokens / done.seconds
                print(f"{num_sessions:3} sessions: {rate:.2f} tokens per second", file=sys.stderr, flush=True)
            if self._arguments.rounds:
                write_runs(Path(self._arguments.rounds), [*self.alone.values(), *self.groups])

    def figures(self) -> dict[str, Any]:
        """The figures of the JSON line."""
        ratios, steady, rates = defaultdict(list), defaultdict(list), defaultdict(list)
        for group in self.groups:
            alone = [self.alone[number] for number in group.numbers]
            num = group.num_sessions
            rates[num].append(group.num_tokens / group.seconds)
            ratios[num].append(rates[num][-1] * sum(a.seconds for a in alone) / sum(a.num_tokens for a in alone))
            steady[num].append(group.steady_rate / statistics.mean(a.steady_rate for a in alone))
        rates[1] = [each.num_tokens / each.seconds for each in self.alone.values()]
        return {
            "throughput_ratio": {1: 1.0} | _quartiles(ratios),
            "steady_ratio": {1: 1.0} | _quartiles(steady),
            "tokens_per_second": _quartiles(rates),
        }

    def tally(self) -> Tally:
        """Compare every session that ran with others to the same prompt alone."""
        tally = Tally()
        for group in self.groups:
            for number, each in zip(group.numbers, group.streams, strict=True):
                alone = self.alone[number].streams[0]
                tally.compare(each, Answer(tuple(alone.token_ids), alone.text))
        return tally


def _quartile(values: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    ordered = sorted(values)
    quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return [round(value, 3) for value in quartiles]


def _quartiles(by_number: dict[int, list[float]]) -> dict[int, list[float]]:
    return {number: _quartile(values) for number, values in sorted(by_number.items())}


def _settings(arguments: argparse.Namespace, model: str) -> Settings:
    if arguments.simulate:
        target = draft = ["--simulate", arguments.simulate]
    else:
        target = ["--model", model, "--resident-layers", "0"]
        draft = ["--model", arguments.draft or model, "--drop-layers", arguments.drop_layers]
    target = [*target, *shlex.split(arguments.target_flags)]
    draft = [*draft, *shlex.split(arguments.draft_flags)]
    return settings_of(target, draft, shlex.split(arguments.orchestrator_flags))


async def measured(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """All figures of the JSON line."""
    files = simulated_tokenizer() if arguments.simulate else load_tokenizer_files(Path(model))
    rng, bench = random.Random(arguments.seed), Bench(_settings(arguments, model), Tokenizer(files), arguments)
    for number in range(arguments.repeats):
        print(f"repeat {number + 1} of {arguments.repeats}", file=sys.stderr, flush=True)
        await bench.repeat(number, rng)
    tally = bench.tally()
    return {
        **bench.figures(),
        "lost_tokens": tally.lost_tokens,
        "repeated_tokens": tally.repeated_tokens,
        "unequal_streams": tally.unequal,
        "cores": os.cpu_count(),
        "settings": vars(arguments),
    }


def _arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__)
    parser.add_argument("--model", default="", help='target; "tiny" is a random one to try the command')
    parser.add_argument("--simulate", default="", metavar="PROFILE", help="simulated workers instead of models")
    parser.add_argument("--draft", default="", help="draft model (default: the target without --drop-layers)")
    parser.add_argument("--drop-layers", default=SUBSTITUTE_DROPS, help="layers that the draft leaves out")
    parser.add_argument("--sessions", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="concurrent sessions")
    parser.add_argument("--prompts-each", type=int, default=1, help="prompts that each session sends one after another")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens of each output")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--target-flags", default="")
    parser.add_argument("--draft-flags", default="")
    parser.add_argument("--orchestrator-flags", default="")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", default="", help="file in which every round is recorded, for loadtest.capacity")
    arguments = parser.parse_args()
    wanted, there_are = max(arguments.sessions) * arguments.prompts_each, len(load_prompts())
    if wanted > there_are:
        parser.error(f"--sessions and --prompts-each: {wanted} prompts are wanted, and there are {there_are}")
    return arguments


def main() -> None:
    """Print progress, and one JSON line."""
    arguments = _arguments()
    if arguments.model == "" and not arguments.simulate:
        ensure_demonstration()
    with TemporaryDirectory(prefix="bough-tiny-") as folder:
        tiny = str(save_model(Path(folder))) if arguments.model == "tiny" else ""
        print(json.dumps(asyncio.run(measured(arguments, tiny or arguments.model or str(demonstration_folder())))))


if __name__ == "__main__":
    main()
