"""Compares bough with llama.cpp on a CPU: the same weights and prompts, streamed from disk and in memory.

    pip install '.[peer]'
    python -m loadtest.peers.llama_cpp
    python -m loadtest.peers.llama_cpp --prompts 4 --tokens 32 --peer-python OTHER_ENVIRONMENT/bin/python

llama.cpp (package `xllamacpp`) has the demonstration target as GGUF: plain, with the substitute draft, and plain in 4
bits. bough is `bough up` with its defaults and KV for one session, plain and with speculation. All sides have equal
threads, context and output lengths, and decode greedily. There are two regimes: `limited` gives all processes of a side
the same memory, page cache included, by control groups (root); `resident` has no limit. llama.cpp restarts for every
prompt, with its files dropped from the page cache if memory is limited. Half of the prompts choose the draft length; on
the others all sides take turns in random order. bough has part of a repeated prompt cached, which affects `overall`.

Ends with one JSON line. By regime:

draft_tokens       length of llama.cpp's drafts; `chosen_by`: tokens per second by length, on the other prompts
tokens_per_second  by side, after the first tokens: geometric mean, worst, best; `overall` includes the prompt
ratio              bough over llama.cpp, paired by prompt: geometric mean, 95 % interval over prompts, worst, best
equal_texts        whether sides with the same weights gave the same tokens; `differences` has their first difference
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bough.config.cache_paths import demonstration_folder
from bough.config.flag_parser import FlagParser
from bough.config.parsers import parse_bytes
from bough.errors import BoughError
from bough.model.checkpoint.model_places import load_tokenizer_files
from bough.processes.demonstration import ensure_demonstration
from bough.tokenization.tokenizer import Tokenizer
from loadtest.common.limits import drop_cached
from loadtest.common.machine import processor
from loadtest.common.prompts import load_prompts
from loadtest.peers.gguf import FORMATS, Pair, export_demonstration, gguf_folder
from loadtest.peers.llama_cpp_sides import (
    Answer,
    Bough,
    LlamaSettings,
    bough_up,
    llama_server,
    require_peer,
    why_unlimited,
)

NUM_RESAMPLES = 4000
INTERVAL = (2.5, 97.5)  # percent

Value = TypeVar("Value")


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers.

    Raises:
        ValueError: there are no values, or one is not above 0.
    """
    if not values or min(values) <= 0:
        raise ValueError(f"rates: must be at least one, all above 0, got {list(values)}")
    return math.exp(fmean(map(math.log, values)))


def ratio(ours: Sequence[float], theirs: Sequence[float], seed: int, num_digits: int = 3) -> dict[str, Any]:
    """Ratios of ours to theirs, paired: geometric mean, its 95 % bootstrap interval, minimum and maximum.

    Raises:
        ValueError: the numbers of values differ, or one value is not above 0.
    """
    pairs = [geometric_mean([a]) / geometric_mean([b]) for a, b in zip(ours, theirs, strict=True)]
    return {
        "geomean": round(geometric_mean(pairs), num_digits),
        "interval": interval(pairs, geometric_mean, seed, num_digits),
        "worst": round(min(pairs), num_digits),
        "best": round(max(pairs), num_digits),
    }


def interval(
    values: Sequence[Value], statistic: Callable[[Sequence[Value]], float], seed: int, num_digits: int = 3
) -> list[float]:
    """The 95 % bootstrap interval of a statistic of some values."""
    rng = random.Random(seed)
    figures = [statistic(rng.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES)]
    low, high = np.percentile(figures, INTERVAL)
    return [round(float(low), num_digits), round(float(high), num_digits)]


LLAMA_PLAIN, LLAMA_DRAFT, LLAMA_4_BIT = "llama_cpp_plain", "llama_cpp_draft", "llama_cpp_plain_4_bit"
BOUGH_PLAIN, BOUGH = "bough_plain", "bough"
SIDES = (LLAMA_PLAIN, LLAMA_DRAFT, LLAMA_4_BIT, BOUGH_PLAIN, BOUGH)
SAME_WEIGHTS = (LLAMA_PLAIN, LLAMA_DRAFT, BOUGH_PLAIN, BOUGH)  # sides that should give the same texts
RATIOS = {  # pairs of sides, bough's first
    "with_draft": (BOUGH, LLAMA_DRAFT),
    "plain": (BOUGH_PLAIN, LLAMA_PLAIN),
    "over_4_bit": (BOUGH, LLAMA_4_BIT),  # with other weights of fewer bytes
}


class Halves(NamedTuple):
    """Numbers of the prompts for choosing a draft length, and of those for measuring all sides."""

    chosen_on: tuple[int, ...]
    scored_on: tuple[int, ...]


def halves(num_prompts: int) -> Halves:
    """Split prompts alternately; the first one, and the extra one of an odd number, are for measuring.

    Raises:
        ValueError: there are fewer than two.
    """
    if num_prompts < 2:
        raise ValueError(f"prompts: must be at least 2, as half of them choose a draft length, got {num_prompts}")
    return Halves(tuple(range(1, num_prompts, 2)), tuple(range(0, num_prompts, 2)))


def best_length(rates: Mapping[int, Sequence[float]]) -> int:
    """The draft length with the highest geometric mean of tokens per second; the shortest among equals.

    Raises:
        ValueError: there are no lengths, or a length has no rates, or one that is not above 0.
    """
    if not rates:
        raise ValueError("draft lengths: there were none; must be at least one")
    return max(sorted(rates), key=lambda length: geometric_mean(rates[length]))


def spread(values: Sequence[float]) -> dict[str, float]:
    """The geometric mean, of which two sides' quotient is their ratio, and the lowest and highest value."""
    figures = {"geomean": geometric_mean(values), "worst": min(values), "best": max(values)}
    return {name: round(figure, 3) for name, figure in figures.items()}


def first_difference(left: Sequence[int], right: Sequence[int], eos_ids: Collection[int]) -> int | None:
    """Position of the first token in which two texts differ; None if they are equal.

    They are compared up to the first end-of-text token: after it bough continues with the model's choice, while
    llama.cpp ignores the end and has chosen another token instead.
    """
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a in eos_ids or b in eos_ids:
            return None
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def differences(
    texts: Mapping[str, Mapping[int, Sequence[int]]], reference: str, eos_ids: Collection[int]
) -> dict[str, dict[int, int]]:
    """Positions of the first difference from the reference, by side and prompt, if there is one."""
    found: dict[str, dict[int, int]] = {}
    for side, by_prompt in texts.items():
        for number, token_ids in by_prompt.items():
            position = first_difference(token_ids, texts[reference][number], eos_ids)
            if position is not None:
                found.setdefault(side, {})[number] = position
    return found


def summary(
    decode: Mapping[str, Sequence[float]], overall: Mapping[str, Sequence[float]], length: int, seed: int
) -> dict[str, Any]:
    """Summary of a regime: tokens per second by side, and bough's ratios to llama.cpp."""
    return {
        "draft_tokens": length,
        "tokens_per_second": {side: spread(decode[side]) for side in SIDES},
        "overall_tokens_per_second": {side: spread(overall[side]) for side in SIDES},
        "ratio": {name: ratio(decode[ours], decode[theirs], seed) for name, (ours, theirs) in RATIOS.items()},
        "overall_ratio": {name: ratio(overall[ours], overall[theirs], seed) for name, (ours, theirs) in RATIOS.items()},
    }


MIN_TOKENS = 16  # fewer would give too few rounds for a rate
UBATCH = 64
LIMITED_SHARE = 0.75  # share of the time for the regime with streamed weights
CHOOSING_SHARE = 0.4  # share of a regime's time for choosing the draft length


@dataclass(slots=True)
class Regime:
    """A memory limit and the measurements under it."""

    name: str
    memory_bytes: int  # 0 is no limit
    minutes: float  # after which no further prompt begins
    by_length: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    answers: dict[str, dict[int, Answer]] = field(default_factory=lambda: defaultdict(dict))  # by side and prompt


class Prompts(NamedTuple):
    """Token ids of the prompts."""

    measured: Sequence[Sequence[int]]
    warm_up: Sequence[int]  # a further prompt
    eos_ids: Sequence[int]

    @classmethod
    def of_demonstration(cls, num_prompts: int) -> Prompts:
        """The first `num` shipped prompts, with the demonstration's chat template."""
        tokenizer = Tokenizer(load_tokenizer_files(demonstration_folder()))
        *texts, last = load_prompts()
        encoded = [tokenizer.encode_chat([("user", text)]) for text in texts[:num_prompts]]
        return cls(encoded, tokenizer.encode_chat([("user", last)]), tokenizer.files.eos_token_ids)


class Bench:
    """Runs all prompts on both sides."""

    def __init__(self, arguments: argparse.Namespace, prompts: Prompts, bits_16: Pair, bits_4: Pair) -> None:
        self._arguments = arguments
        self._prompts = prompts
        self._bits_16, self._bits_4 = bits_16, bits_4
        self._rng = random.Random(arguments.seed)
        self.llama_cpp: dict[str, str] = {}  # version and instructions

    async def measure(self, regime: Regime) -> dict[str, Any]:
        """Choose the draft length, measure all sides, and summarise."""
        is_resident = regime.memory_bytes == 0
        drop_cached(demonstration_folder())
        began = time.monotonic()
        context = self._arguments.context
        async with bough_up(context, regime.memory_bytes, is_resident=is_resident) as bough:
            await bough.ask(self._prompts.warm_up, 8, is_plain=False)
            chosen_on, scored_on = halves(len(self._prompts.measured))
            ends = [began + 60 * regime.minutes * share for share in (CHOOSING_SHARE, 1.0)]
            for number in _until(ends[0], chosen_on):
                await self._try_lengths(regime, number)
            length = best_length(regime.by_length)
            for number in _until(ends[1], scored_on):
                for side in self._rng.sample(SIDES, len(SIDES)):
                    regime.answers[side][number] = answer = await self._answer(regime, bough, side, number, length)
                    _tell(f"{regime.name}, prompt {number}, {side}: {answer.decode_rate:.2f} tokens per second")
        return self._summed_up(regime, length)

    async def _try_lengths(self, regime: Regime, number: int) -> None:
        lengths = self._arguments.lengths
        for length in self._rng.sample(lengths, len(lengths)):
            rate = (await self._ask_llama(regime, LLAMA_DRAFT, number, length)).decode_rate
            regime.by_length[length].append(rate)
            _tell(f"{regime.name}, prompt {number}, {length} drafted: {rate:.2f} tokens per second")

    async def _answer(self, regime: Regime, bough: Bough, side: str, number: int, length: int) -> Answer:
        if side in (BOUGH, BOUGH_PLAIN):
            return await bough.ask(self._prompts.measured[number], self._arguments.tokens, is_plain=side == BOUGH_PLAIN)
        return await self._ask_llama(regime, side, number, length)

    async def _ask_llama(self, regime: Regime, side: str, number: int, length: int) -> Answer:
        """Ask llama.cpp in a new process, as pages cached by an earlier one are not charged to its memory limit."""
        settings = LlamaSettings(
            model=str(self._bits_4.target if side == LLAMA_4_BIT else self._bits_16.target),
            draft=str(self._bits_16.draft) if side == LLAMA_DRAFT else "",
            draft_tokens=length,
            threads=self._arguments.threads,
            context=self._arguments.context,
            ubatch=UBATCH,
        )
        if regime.memory_bytes:
            drop_cached(gguf_folder())
        python, variables = self._arguments.peer_python, dict(self._arguments.peer_variable)
        with llama_server(python, settings, regime.memory_bytes, variables) as server:
            self.llama_cpp = {"xllamacpp": server.version, "system_info": server.system_info}
            return await asyncio.to_thread(server.ask, self._prompts.measured[number], self._arguments.tokens)

    def _summed_up(self, regime: Regime, length: int) -> dict[str, Any]:
        answers = {side: dict(sorted(regime.answers[side].items())) for side in SIDES}
        decode = {side: [each.decode_rate for each in of.values()] for side, of in answers.items()}
        overall = {side: [each.overall_rate for each in of.values()] for side, of in answers.items()}
        texts = {side: {number: each.token_ids for number, each in answers[side].items()} for side in SAME_WEIGHTS}
        differing = differences(texts, BOUGH_PLAIN, self._prompts.eos_ids)
        return {
            "memory_bytes": regime.memory_bytes,
            "load_after": round(
                os.getloadavg()[2], 2
            ),  # over 15 minutes; this benchmark itself adds about the number of threads
            "prompts_chosen_on": len(next(iter(regime.by_length.values()))),
            "prompts_scored_on": len(answers[BOUGH]),
            "chosen_by": {n: [round(rate, 3) for rate in rates] for n, rates in sorted(regime.by_length.items())},
            **summary(decode, overall, length, self._arguments.seed),
            "equal_texts": not differing,
            "differences": differing,
        }


def _until(end: float, numbers: Sequence[int]) -> Iterator[int]:
    """Yield at least the first number, and then the others until a moment on the monotonic clock."""
    for position, number in enumerate(numbers):
        if position and time.monotonic() > end:
            _tell(f"time is up: {len(numbers) - position} of {len(numbers)} prompts are left out")
            return
        yield number


def machine() -> dict[str, Any]:
    """Description of the machine and its load before the measurement."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_before": round(os.getloadavg()[0], 2),
    }


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every requested regime that is possible here. SIGTERM ends it like Ctrl-C, without leaving processes."""
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    require_peer(arguments.peer_python)
    ensure_demonstration()
    figures: dict[str, Any] = {"machine": machine()}
    prompts = Prompts.of_demonstration(arguments.prompts)
    bench = Bench(arguments, prompts, export_demonstration(arguments.format), export_demonstration("q4_0"))
    began = time.monotonic()
    regimes: dict[str, Any] = {}
    for name in arguments.regimes:
        is_limited = name == "limited"
        share = 1.0 if len(arguments.regimes) == 1 else LIMITED_SHARE if is_limited else 1 - LIMITED_SHARE
        reason = why_unlimited(arguments.memory) if is_limited else ""
        regime = Regime(name, arguments.memory if is_limited else 0, arguments.minutes * share)
        regimes[name] = {"skipped": reason} if reason else await bench.measure(regime)
        _tell(json.dumps({name: regimes[name]}))
    versions = {name: version(name) for name in ("bough", "torch", "gguf")}
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    return {
        **figures,
        "versions": {**versions, **bench.llama_cpp},
        "seconds": round(time.monotonic() - began),
        **regimes,
        "settings": {**settings, "peer_python": Path(arguments.peer_python).name, "ubatch": UBATCH},
    }


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; exits with a message if they are invalid."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--regimes", nargs="+", choices=("limited", "resident"), default=["limited", "resident"])
    parser.add_argument("--prompts", type=int, default=8, help="how many of loadtest/data/prompts.jsonl")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[4, 8, 16], help="lengths to try of llama.cpp's drafts"
    )
    parser.add_argument("--memory", type=parse_bytes, default=parse_bytes("2.1GB"), help="limit of a side's memory")
    parser.add_argument("--format", choices=sorted(FORMATS), default="bf16", help="format of the compared weights")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of llama.cpp; bough uses all cores")
    parser.add_argument("--context", type=int, default=512, help="most tokens of a session, on both sides")
    parser.add_argument("--minutes", type=float, default=25.0, help="after this time no further prompt starts")
    parser.add_argument("--seed", type=int, default=1, help="seed of the order and of the intervals")
    parser.add_argument("--peer-python", default=sys.executable, help="Python of an environment that has xllamacpp")
    parser.add_argument(
        "--peer-variable",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable for llama.cpp; GOMP_SPINCOUNT=3000 helps it on a busy machine",
    )
    arguments = parser.parse_args(argv)
    arguments.peer_python = shutil.which(arguments.peer_python) or arguments.peer_python  # resolved by PATH
    there_are = len(load_prompts()) - 1  # the last prompt is for the warm-up
    if not 2 <= arguments.prompts <= there_are:
        parser.error(f"--prompts: must be 2 to {there_are}, got {arguments.prompts}")
    if arguments.tokens < MIN_TOKENS:
        parser.error(f"--tokens: must be at least {MIN_TOKENS}, got {arguments.tokens}")
    return arguments


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text}")
    return name, value


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Print progress, and one JSON line."""
    try:
        print(json.dumps(asyncio.run(run(parse_arguments(sys.argv[1:])))))
    except BoughError as exc:
        raise SystemExit(f"error: {exc}") from exc
    except asyncio.CancelledError:
        raise SystemExit("ended by a signal") from None


if __name__ == "__main__":
    main()
