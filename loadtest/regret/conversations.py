"""Measures the time to the first token of conversations that are sent whole, with and without a session name.

An index, an orchestrator and simulated workers run as processes. Each turn sends the whole history, which the target
has cached. Requests with a session name, without one, and plain decoding take turns at the same conversations. Each has
its own `cache_salt`, so they share no cached prompts. Seconds are the profile's.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bough.client import Client
from bough.processes.launch import launched
from bough.protocol.generation import GenerateOptions, Speculation, TokenPrompt
from loadtest.common.stacks import stack_settings
from loadtest.common.streams import Stream, stream
from loadtest.regret.scoring import geomean

NAME = "conversations without session names"
PROFILE = "two-cores"  # every row takes time, so a tree that is too large is slower
UNNAMED, NAMED, PLAIN = "unnamed", "named", "plain"
FIRST_WORD, NUM_WORDS = 10, 200  # tokens of prompts


@dataclass(frozen=True, slots=True)
class Scale:
    """The amount of work to run."""

    num_conversations: int = 3
    num_turns: int = 4
    prompt_tokens: int = 640
    question_tokens: int = 6
    answer_tokens: int = 24
    clock_scale: float = 10.0  # simulated seconds in a real one


@dataclass(slots=True)
class Measured:
    """Times to the first token of later turns, in simulated seconds, by contestant."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    nodes: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # of the first tree
    cached_shares: list[float] = field(default_factory=list)  # of the prompts without a session name
    num_unequal: int = 0  # answers that differ from plain decoding

    def figures(self) -> dict[str, Any]:
        """The figures of the JSON line."""
        pairs = zip(self.seconds[UNNAMED], self.seconds[NAMED], strict=True)
        return {
            "first_token_seconds": {name: round(geomean(seconds), 3) for name, seconds in self.seconds.items()},
            "most_first_token_seconds": {name: round(max(seconds), 3) for name, seconds in self.seconds.items()},
            "unnamed_over_named": round(geomean([unnamed / named for unnamed, named in pairs]), 3),
            "first_nodes": {name: statistics.median(nodes) for name, nodes in self.nodes.items()},
            "least_cached_share": round(min(self.cached_shares), 3),
            "unequal": self.num_unequal,
        }


async def converse(client: Client, scale: Scale, measured: Measured, number: int) -> None:
    """Have one conversation in every way, turn by turn."""
    history = _words(number, 0, scale.prompt_tokens)
    for turn in range(scale.num_turns):
        names = (UNNAMED, NAMED, PLAIN)
        first = (number + turn) % len(names)
        answers: dict[str, Stream] = {}
        for name in (*names[first:], *names[:first]):
            answer = answers[name] = await stream(client, TokenPrompt(tuple(history)), _options(scale, name, number))
            if turn:
                measured.seconds[name].append(scale.clock_scale * answer.first_token_seconds)
                measured.nodes[name].append(answer.rounds[0][1].num_nodes)
        if turn:
            measured.cached_shares.append(answers[UNNAMED].done.usage.cached_tokens / len(history))
        plain = answers[PLAIN].token_ids
        measured.num_unequal += sum(answers[name].token_ids != plain for name in (UNNAMED, NAMED))
        history = [*history, *plain, *_words(number, len(history), scale.question_tokens)]


def _options(scale: Scale, name: str, number: int) -> GenerateOptions:
    return GenerateOptions(
        session_id=f"{NAME} {number}" if name == NAMED else "",
        cache_salt=name,
        seed=number,
        temperature=0.0,
        max_tokens=scale.answer_tokens,
        ignore_eos=True,
        speculation=Speculation(disabled=name == PLAIN),
    )


def _words(number: int, begin: int, length: int) -> list[int]:
    return [FIRST_WORD + (131 * number + 7 * place) % NUM_WORDS for place in range(begin, begin + length)]


async def measure(scale: Scale, profile: Path) -> Measured:
    """Start everything, measure, and end everything."""
    measured = Measured()
    async with launched(stack_settings(str(profile)), lambda _: None) as cluster, Client(cluster.address) as client:
        for number in range(scale.num_conversations):
            await converse(client, scale, measured, number)
    return measured


def run(scale: Scale = Scale(), names: Sequence[str] = ()) -> dict[str, Any]:
    """Run the regime, unless others are named, and return its figures."""
    if names and NAME not in names:
        return {}
    shipped = importlib.resources.files("bough.simulation") / "profiles" / f"{PROFILE}.json"
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / f"{PROFILE}.json"
        profile.write_text(json.dumps(json.loads(shipped.read_text()) | {"clock_scale": scale.clock_scale}))
        figures = asyncio.run(measure(scale, profile)).figures()
    print(f"{NAME}: {json.dumps(figures)}", file=sys.stderr, flush=True)
    return figures
