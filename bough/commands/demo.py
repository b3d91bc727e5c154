"""`bough demo`: the whole pipeline on the demonstration model, with speculation and without, and what it came to."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from time import perf_counter

from bough.cli import argument_parser
from bough.client import Client
from bough.commands.talk import Answer
from bough.commands.up import clear_report, ensure_demonstration, report, settings_from, tell_of_first_start
from bough.errors import ConfigError
from bough.generation import ChatPrompt, Event, GenerateOptions, Message, Speculation, Tokens
from bough.launch import launched
from bough.messages import WorkerInfo

MIN_TOKENS = 16
GREEN, YELLOW, PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[0m"
UP_DEFAULTS = argument_parser().parse_args(["up", "--port", "0"])


async def demo(arguments: argparse.Namespace) -> int:
    """Builds, starts, generates twice, compares; exit status 1 where the two outputs differ."""
    if arguments.max_tokens < MIN_TOKENS:
        raise ConfigError(
            f"--max-tokens: {arguments.max_tokens}; at least {MIN_TOKENS} would do: rates need some rounds"
        )
    ensure_demonstration()
    tell_of_first_start()
    async with launched(settings_from(UP_DEFAULTS), report) as cluster, Client(cluster.address) as client:
        clear_report()
        speculating = Speculation(budget=arguments.budget)
        print(f"prompt: {arguments.prompt}\n\nwith speculation ({_legend()}):\n")
        fast = await _run(client, arguments, speculating)
        print("\nwithout speculation:\n")
        plain = await _run(client, arguments, Speculation(disabled=True))
        models = {worker.info.kind: _described(worker.info) for worker in (await client.server_info()).workers}
    is_same = fast.answer.token_ids == plain.answer.token_ids
    _print_table(fast, plain, is_same=is_same)
    print("\nThe target, block-expanded, has the text of SmolLM2-135M-Instruct and the cost of a 2.1 GB model.")
    print("\n".join(f"{kind}: {words}" for kind, words in sorted(models.items())) + "\n")
    print(json.dumps({**_summary(fast, plain, is_same=is_same), **models}))
    return 0 if is_same else 1


class Run:
    """One request and the clock beside it."""

    def __init__(self) -> None:
        self.answer = Answer()
        self.began = perf_counter()
        self.first_token_seconds = 0.0
        self.decode_seconds = 0.0  # after the first round, which also reads the prompt

    def add(self, event: Event) -> None:
        """Takes an event in."""
        self.answer.add(event)
        elapsed = perf_counter() - self.began
        if isinstance(event, Tokens):
            self.first_token_seconds = self.first_token_seconds or elapsed
            self.decode_seconds = elapsed - self.first_token_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of the rounds after the first."""
        num_tokens = len(self.answer.token_ids) - len(self.answer.rounds[0].token_ids)
        return num_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Of all rounds."""
        return len(self.answer.token_ids) / len(self.answer.rounds)

    def mean_seconds(self, name: str) -> float:
        """A part of RoundTimings, over the rounds after the first."""
        rounds = self.answer.rounds[1:] or self.answer.rounds
        total_ns: int = sum(getattr(tokens.timings, name) for tokens in rounds)
        return total_ns / len(rounds) / 1e9


async def _run(client: Client, arguments: argparse.Namespace, speculation: Speculation) -> Run:
    options = GenerateOptions(
        temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=True, speculation=speculation
    )
    run = Run()
    async for event in client.generate(ChatPrompt((Message("user", arguments.prompt),)), options):
        run.add(event)
        if isinstance(event, Tokens):
            print(_coloured(event), end="", flush=True)
    print()
    return run


def _coloured(tokens: Tokens) -> str:
    if not sys.stdout.isatty():
        return tokens.text
    pairs = zip(tokens.texts, tokens.drafted, strict=True)
    return "".join(f"{GREEN if drafted else YELLOW}{text}{PLAIN}" for text, drafted in pairs)


def _legend() -> str:
    return f"{GREEN}drafted{PLAIN}, {YELLOW}bonus{PLAIN}" if sys.stdout.isatty() else "greedy"


def _print_table(fast: Run, plain: Run, *, is_same: bool) -> None:
    figures: tuple[tuple[str, Callable[[Run], float]], ...] = (
        ("tokens per second", lambda run: run.tokens_per_second),
        ("tokens per round", lambda run: run.tokens_per_round),
        ("seconds to the first token", lambda run: run.first_token_seconds),
        ("seconds per round", lambda run: run.mean_seconds("total_ns")),
        ("  draft", lambda run: run.mean_seconds("draft_ns")),
        ("  network", lambda run: run.mean_seconds("network_ns")),
        ("  target: waiting for weights", lambda run: run.mean_seconds("wait_ns")),
        ("  target: compute", lambda run: run.mean_seconds("compute_ns")),
        ("link efficiency", lambda run: run.mean_seconds("link_ideal_ns") / run.mean_seconds("total_ns")),
    )
    print(f"\n{'':34}{'speculation':>12}{'plain':>10}")
    for title, value in figures:
        print(f"{title:34}{value(fast):12.3f}{value(plain):10.3f}")
    print(f"{'speed-up':34}{fast.tokens_per_second / plain.tokens_per_second:12.2f}")
    print(f"{'same tokens':34}{'yes' if is_same else 'NO':>12}")


def _described(info: WorkerInfo) -> str:
    return "; ".join((f"{info.model_name}: {info.model_description}", *info.notes))


def _summary(fast: Run, plain: Run, *, is_same: bool) -> dict[str, float | bool]:
    return {
        "speedup": round(fast.tokens_per_second / plain.tokens_per_second, 3),
        "tokens_per_round": round(fast.tokens_per_round, 3),
        "same_tokens": is_same,
        "sweep_seconds": round(fast.mean_seconds("target_ns"), 4),
        "draft_seconds": round(fast.mean_seconds("draft_ns"), 4),
        "wait_seconds": round(fast.mean_seconds("wait_ns"), 4),
        "compute_seconds": round(fast.mean_seconds("compute_ns"), 4),
        "network_seconds": round(fast.mean_seconds("network_ns"), 4),
        "tokens_per_second": round(fast.tokens_per_second, 3),
        "plain_tokens_per_second": round(plain.tokens_per_second, 3),
        "plain_sweep_seconds": round(plain.mean_seconds("target_ns"), 4),
        "num_tokens": len(fast.answer.token_ids),
    }
