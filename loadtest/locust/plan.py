"""The plan of a load test, passed from the command to locust's process, and the mix of its requests."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

WORD_TOKENS = 1.3  # approximate tokens of an English word: lengths of prompts are estimated


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request."""

    prompt_tokens: int  # approximate
    answer_tokens: int  # limit
    weight: float  # frequency relative to the sum of all weights


@dataclass(frozen=True, slots=True)
class Question:
    """A user's next message."""

    text: str
    answer_tokens: int


class Mix:
    """Draws questions, reproducibly from a seed."""

    def __init__(self, kinds: Sequence[Kind], texts: Sequence[str], seed: int) -> None:
        self._kinds, self._texts = tuple(kinds), tuple(texts)
        self._random = random.Random(seed)

    def question(self) -> Question:
        """A random text, extended to its kind's length by preceding texts."""
        (kind,) = self._random.choices(self._kinds, [kind.weight for kind in self._kinds])
        num_words = max(1, round(kind.prompt_tokens / WORD_TOKENS))
        words = self._random.choice(self._texts).split()
        while len(words) < num_words:
            words = self._random.choice(self._texts).split() + words
        # A unique number prevents reuse of other questions' KV.
        return Question(f"{self._random.getrandbits(32):x}: " + " ".join(words[-num_words:]), kind.answer_tokens)

    def pause(self, mean_seconds: float) -> float:
        """Seconds until a user's next message, exponentially distributed."""
        return self._random.expovariate(1 / mean_seconds) if mean_seconds > 0 else 0.0


def holds_conversations(number: int, share: float) -> bool:
    """Whether a user of this number, counted from 0 at each API, is of the share who hold conversations."""
    return math.floor((number + 1) * share) > math.floor(number * share)


def parse_kinds(text: str) -> tuple[Kind, ...]:
    """Parse kinds from "PROMPT:ANSWER:WEIGHT,...": token counts and relative frequency.

    Raises:
        argparse.ArgumentTypeError: names the invalid part.
    """
    kinds = []
    for part in text.split(","):
        try:
            prompt, answer, weight = part.split(":")
            kind = Kind(int(prompt), int(answer), float(weight))
        except ValueError as exc:
            raise argparse.ArgumentTypeError(f"must be PROMPT:ANSWER:WEIGHT, as 200:64:3, got {part!r}") from exc
        if kind.prompt_tokens < 1 or kind.answer_tokens < 1 or not 0 < kind.weight < float("inf"):
            raise argparse.ArgumentTypeError(f"must be three numbers greater than 0, got {part!r}")
        kinds.append(kind)
    return tuple(kinds)


VARIABLE: Final = "LOADTEST_PLAN"  # environment variable


@dataclass(frozen=True, slots=True)
class Plan:
    """Users and their behaviour."""

    apis: tuple[str, ...]  # "grpc", "http": APIs among which users are distributed
    address: str  # of gRPC
    http_url: str  # without /v1
    kinds: tuple[Kind, ...]
    conversations: float  # share of users who hold conversations, 0 to 1
    turns: int  # in a conversation
    think_seconds: float  # mean pause between an answer and the next question
    rate: float  # offered requests per second (open loop); 0 is a closed loop of users
    timeout_seconds: float  # of a request
    samples_path: str  # file with a line of JSON for each request
    seed: int
    # Settings of the climbing load shape; 0 step_users is a constant number of users.
    step_users: int = 0
    step_seconds: float = 20.0
    max_users: int = 512
    bend: float = 3.0  # factor of the first step's TTFT (p95) at which latency counts as risen
    most_seconds: float = 1800.0  # after which the climb ends

    def write_bent_at(self, users: int) -> None:
        """Keep the number of users at which latency rose, 0 for none, for the command."""
        self._bent_path.write_text(str(users))

    def read_bent_at(self) -> int:
        """What `write_bent_at` kept; 0 if nothing is kept."""
        return int(self._bent_path.read_text()) if self._bent_path.exists() else 0

    @property
    def _bent_path(self) -> Path:
        return Path(self.samples_path).with_suffix(".bent")

    def to_environment(self) -> dict[str, str]:
        """The plan as an environment variable."""
        return {VARIABLE: json.dumps(asdict(self))}


def plan_from_environment() -> Plan:
    """Read what `to_environment` wrote. Raises KeyError if it is missing, as when locust was started by hand."""
    values = json.loads(os.environ[VARIABLE])
    kinds = tuple(Kind(**kind) for kind in values.pop("kinds"))
    return Plan(**{**values, "kinds": kinds, "apis": tuple(values["apis"])})
