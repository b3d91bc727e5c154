"""The workload: lengths of prompts and answers, frequencies of kinds, and pauses of users."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

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
