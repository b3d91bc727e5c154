"""`bough demo`: runs the demonstration model with and without speculation, and compares."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from bough.cli.flags.machine import up_arguments
from bough.cli.generation.generate import CollectedAnswer
from bough.cli.machine.up import divided, settings_from
from bough.client import Client
from bough.processes.demonstration import ensure_demonstration
from bough.processes.launch import launched, supervised
from bough.processes.progress import Progress
from bough.protocol.decision import Decision
from bough.protocol.generation import ChatPrompt, Event, GenerateOptions, Message, Speculation, Tokens, WorkerInfo
from bough.runtime.log_lines import report, say, shown
from bough.sizing.account import ratio

GRID_TOKENS = 24  # tokens of each run that compares sizes
GRID_NODES = (4, 16, 64)
SELF_SIZED = 0  # stands for a self-sized tree among these numbers of nodes
GREEN, YELLOW, PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[0m"


class Run:
    """One request and its times."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        """Starts now, on `clock` (in seconds)."""
        self.answer = CollectedAnswer()
        self.decisions: Sequence[Decision] = ()  # of its rounds
        self.first_token_seconds = 0.0
        self.decode_seconds = 0.0  # after the first round, which includes the prefill
        self._clock = clock
        self._began = clock()

    def add(self, event: Event) -> None:
        self.answer.add(event)
        elapsed = self._clock() - self._began
        if isinstance(event, Tokens):
            self.first_token_seconds = self.first_token_seconds or elapsed
            self.decode_seconds = elapsed - self.first_token_seconds

    @property
    def num_decoded(self) -> int:
        """Tokens after the first round."""
        return len(self.answer.token_ids) - len(self.answer.rounds[0].token_ids)

    @property
    def nodes(self) -> list[int]:
        """Verified nodes of each round, the root included."""
        return [decision.num_sent - decision.num_left_out for decision in self.decisions]


@dataclass(frozen=True, slots=True)
class Side:
    """One or more runs of one way to decode."""

    title: str
    runs: Sequence[Run]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second after the first round of each run."""
        seconds = sum(run.decode_seconds for run in self.runs)
        return sum(run.num_decoded for run in self.runs) / seconds if seconds else 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of all runs, first rounds included."""
        return sum(len(run.answer.token_ids) for run in self.runs)

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens of a round."""
        return self.num_tokens / sum(len(run.answer.rounds) for run in self.runs)

    @property
    def first_token_seconds(self) -> float:
        """Mean seconds to the first token."""
        return sum(run.first_token_seconds for run in self.runs) / len(self.runs)

    @property
    def mean_nodes(self) -> float:
        """Mean nodes of a verified tree, the root included; 0 without decisions."""
        nodes = [count for run in self.runs for count in run.nodes]
        return sum(nodes) / len(nodes) if nodes else 0.0

    def mean_seconds(self, name: str) -> float:
        """Mean of a field of RoundTimings, in seconds, over the rounds after the first of each run."""
        rounds = [tokens for run in self.runs for tokens in run.answer.rounds[1:] or run.answer.rounds]
        total_ns: int = sum(getattr(tokens.timings, name) for tokens in rounds)
        return total_ns / len(rounds) / 1e9


@dataclass(frozen=True, slots=True)
class Contest:
    """All runs: `first` and `plain` of full length, `warm` and `fixed` shorter, to compare sizes."""

    first: Side  # trees of the requested size, or self-sized before anything was measured
    plain: Side  # without speculation
    warm: Side | None = None  # self-sized trees, later
    fixed: Mapping[int, Side] = field(default_factory=dict)  # by nodes; given together with `warm`

    @property
    def is_same(self) -> bool:
        """Whether all runs have the tokens of plain decoding."""
        expected = self.plain.runs[0].answer.token_ids
        sides = [self.first, *([self.warm] if self.warm else []), *self.fixed.values()]
        outputs = [run.answer.token_ids for side in sides for run in side.runs]
        return self.first.runs[0].answer.token_ids == expected and all(
            expected[: len(each)] == each for each in outputs
        )

    @property
    def best_fixed(self) -> int:
        """Nodes of the fastest fixed size; 0 if none was run."""
        return max(self.fixed, key=lambda nodes: self.fixed[nodes].tokens_per_second, default=0)

    @property
    def speedup(self) -> float:
        """Tokens per second of `first` over those of plain decoding."""
        return ratio(self.first.tokens_per_second, self.plain.tokens_per_second)

    @property
    def self_sized_over_best_fixed(self) -> float:
        """Tokens per second of `warm` over those of the best fixed size; 0 if not compared."""
        if self.warm is None:
            return 0.0
        return ratio(self.warm.tokens_per_second, self.fixed[self.best_fixed].tokens_per_second)

    def table(self) -> Iterator[str]:
        """Lines of a table with a column for each side; only the best fixed size has one."""
        compared = [] if self.warm is None else [self.warm, self.fixed[self.best_fixed]]
        sides = [self.first, *compared, self.plain]
        yield f"{'':34}" + "".join(f"{side.title:>18}" for side in sides)
        for title, value in FIGURES:
            yield f"{title:34}" + "".join(f"{value(side):18.3f}" for side in sides)
        yield f"{'times plain decoding':34}" + "".join(
            f"{ratio(side.tokens_per_second, self.plain.tokens_per_second):18.2f}" for side in sides
        )
        yield f"{'same tokens':34}{'yes' if self.is_same else 'NO':>18}"
        if self.warm is not None:
            sizes, part = ", ".join(map(str, self.fixed)), len(self.warm.runs[0].answer.token_ids)
            yield (
                f"self-sized, warm, over the best of {sizes} nodes, chosen in hindsight: "
                f"{self.self_sized_over_best_fixed:.2f}; "
                f"both on the first {part} tokens only, {len(self.warm.runs)} times"
            )

    def summary(self) -> dict[str, Any]:
        """The content of the final JSON line."""
        first, plain = self.first, self.plain
        parts = ("draft", "wait", "compute", "network")
        return {
            "speedup": round(self.speedup, 3),
            "tokens_per_round": round(first.tokens_per_round, 3),
            "same_tokens": self.is_same,
            "sweep_seconds": round(first.mean_seconds("target_ns"), 4),
            **{f"{part}_seconds": round(first.mean_seconds(f"{part}_ns"), 4) for part in parts},
            "tokens_per_second": round(first.tokens_per_second, 3),
            "plain_tokens_per_second": round(plain.tokens_per_second, 3),
            "plain_sweep_seconds": round(plain.mean_seconds("target_ns"), 4),
            "num_tokens": first.num_tokens,
            "nodes": first.runs[0].nodes,
            **({} if self.warm is None else self._sizes(self.warm)),
        }

    def _sizes(self, warm: Side) -> dict[str, Any]:
        return {
            "self_sized_over_best_fixed": round(self.self_sized_over_best_fixed, 3),
            "best_fixed_nodes": self.best_fixed,
            "fixed_tokens_per_second": {str(n): round(side.tokens_per_second, 3) for n, side in self.fixed.items()},
            "warm_tokens_per_second": round(warm.tokens_per_second, 3),
            "warm_nodes": [run.nodes for run in warm.runs],
            "compared_tokens": len(warm.runs[0].answer.token_ids),
        }


FIGURES: tuple[tuple[str, Callable[[Side], float]], ...] = (
    ("tokens", lambda side: side.num_tokens),
    ("tokens per second", lambda side: side.tokens_per_second),
    ("tokens per round", lambda side: side.tokens_per_round),
    ("nodes per round", lambda side: side.mean_nodes),
    ("seconds to the first token", lambda side: side.first_token_seconds),
    ("seconds per round", lambda side: side.mean_seconds("total_ns")),
    ("  draft", lambda side: side.mean_seconds("draft_ns")),
    ("  network", lambda side: side.mean_seconds("network_ns")),
    ("  target: waiting for weights", lambda side: side.mean_seconds("wait_ns")),
    ("  target: compute", lambda side: side.mean_seconds("compute_ns")),
    ("link efficiency", lambda side: ratio(side.mean_seconds("link_ideal_ns"), side.mean_seconds("total_ns"))),
)


async def demo(arguments: argparse.Namespace) -> int:
    """Write the model, start all processes, generate in several ways, compare; exit status 1 if outputs differ."""
    settings = settings_from(up_arguments(*([] if arguments.simulate is None else ["--simulate", arguments.simulate])))
    if not arguments.simulate:
        await asyncio.to_thread(ensure_demonstration)  # Ctrl-C acts where a command awaits
    settings = divided(settings, report=lambda _: None)  # the last lines have the memory of each worker
    progress = Progress()
    async with launched(settings, progress) as cluster, supervised(cluster, report), cluster.client() as client:
        progress.clear()
        workers = {worker.info.kind: worker.info for worker in (await client.server_info()).workers}
        contest = await _run_all(client, arguments, workers["target"].max_nodes)
    print("\n" + "\n".join(contest.table()) + "\n")
    if arguments.simulate:
        print("Workers were simulated: times come from a profile, and the text is random words.")
    else:
        print("The target, block-expanded, has the text of SmolLM2-135M-Instruct and the cost of a 2.1 GB model.")
    models = {kind: _described(info) for kind, info in sorted(workers.items())}
    say(*(f"{kind}: {words}" for kind, words in models.items()), "")
    print(json.dumps({**contest.summary(), **models}))
    return 0 if contest.is_same else 1


async def _run_all(client: Client, arguments: argparse.Namespace, max_nodes: int) -> Contest:
    """Run the prompt with trees and without; then, unless --budget is given, its first tokens with several sizes."""
    is_asked = arguments.budget is not None
    title = f"{arguments.budget} nodes" if is_asked else "self-sized, cold"
    first_words = "of the requested size" if is_asked else "that size themselves, before anything is measured"
    legend = f"{GREEN}drafted{PLAIN}, {YELLOW}bonus{PLAIN}" if sys.stdout.isatty() else "greedy"
    print(f"prompt: {arguments.prompt}\n\nwith trees {first_words} ({legend}):\n")
    first = await _run(client, arguments, Speculation(budget=arguments.budget))
    print("\nwithout speculation:\n")
    plain = await _run(client, arguments, Speculation(disabled=True))
    sides = Side(title, [first]), Side("plain", [plain])
    if is_asked:
        return Contest(*sides)
    warm, fixed = await _run_grid(client, arguments, [nodes for nodes in GRID_NODES if nodes <= max_nodes])
    return Contest(*sides, warm, fixed)


async def _run_grid(client: Client, arguments: argparse.Namespace, grid: list[int]) -> tuple[Side, dict[int, Side]]:
    """Run each size twice, in order and reversed: a drift of the machine's speed then affects all sizes equally."""
    tokens = min(GRID_TOKENS, arguments.max_tokens)
    print(f"\nthe first {tokens} tokens again, with fixed sizes and self-sized (now warm), by turns:\n")
    order = [*grid[:2], SELF_SIZED, *grid[2:]]
    runs: dict[int, list[Run]] = {nodes: [] for nodes in order}
    for nodes in [*order, *reversed(order)]:
        run = await _run(client, arguments, Speculation(budget=nodes or None), tokens)
        runs[nodes].append(run)
        title = f"{nodes} nodes" if nodes else f"self-sized, {Side('', [run]).mean_nodes:.3g} nodes a round"
        print(f"  {Side('', [run]).tokens_per_second:6.2f} tokens per second: {title}", flush=True)
    fixed = {nodes: Side(f"best fixed: {nodes}", runs[nodes]) for nodes in grid}
    return Side("self-sized, warm", runs[SELF_SIZED]), fixed


async def _run(
    client: Client, arguments: argparse.Namespace, speculation: Speculation, part_tokens: int | None = None
) -> Run:
    """Run one request; print its text unless only `part_tokens` of it are generated."""
    options = GenerateOptions(
        temperature=0.0, max_tokens=part_tokens or arguments.max_tokens, ignore_eos=True, speculation=speculation
    )
    run = Run()
    async for event in client.generate(ChatPrompt((Message("user", arguments.prompt),)), options):
        run.add(event)
        if isinstance(event, Tokens) and not part_tokens:
            print(_coloured(event), end="", flush=True)
    if not part_tokens:
        print()
    assert run.answer.started is not None, "a finished stream has started"
    run.decisions = await client.decisions(run.answer.started.request_id)
    return run


def _coloured(tokens: Tokens) -> str:
    if not sys.stdout.isatty():
        return tokens.text
    pairs = zip(tokens.texts, tokens.drafted, strict=True)
    return "".join(f"{GREEN if drafted else YELLOW}{shown(text, sys.stdout)}{PLAIN}" for text, drafted in pairs)


def _described(info: WorkerInfo) -> str:
    return "; ".join((f"{info.model_name}: {info.model_description}", *info.notes))
