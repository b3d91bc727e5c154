"""What users ask: how long prompts and answers are, how often each kind comes, and how long users pause."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

WORD_TOKENS = 1.3  # tokens of a word of English text, about: lengths of prompts are reckoned, not counted


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request."""

    prompt_tokens: int  # about
    answer_tokens: int  # most
    weight: float  # how often it comes, by the sum of all weights


@dataclass(frozen=True, slots=True)
class Question:
    """What a user says next."""

    text: str
    answer_tokens: int


class Mix:
    """Draws questions. Equal seeds give equal questions in equal order."""

    def __init__(self, kinds: Sequence[Kind], texts: Sequence[str], seed: int) -> None:
        self._kinds, self._texts = tuple(kinds), tuple(texts)
        self._random = random.Random(seed)

    def question(self) -> Question:
        """One of the texts, made as long as its kind says by others that precede it."""
        (kind,) = self._random.choices(self._kinds, [kind.weight for kind in self._kinds])
        num_words = max(1, round(kind.prompt_tokens / WORD_TOKENS))
        words = self._random.choice(self._texts).split()
        while len(words) < num_words:
            words = self._random.choice(self._texts).split() + words
        # A number that no other question has keeps one question's KV from answering for another's.
        return Question(f"{self._random.getrandbits(32):x}: " + " ".join(words[-num_words:]), kind.answer_tokens)

    def pause(self, mean_seconds: float) -> float:
        """Seconds until a user speaks again, by an exponential law."""
        return self._random.expovariate(1 / mean_seconds) if mean_seconds > 0 else 0.0


def parse_kinds(text: str) -> tuple[Kind, ...]:
    """Kinds from "PROMPT:ANSWER:WEIGHT,...", tokens and how often.

    Raises:
        argparse.ArgumentTypeError: naming the part that is none.
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
