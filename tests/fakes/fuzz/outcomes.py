"""Outcomes of sent messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MAX_EXAMPLES = 20
ANSWER_SECONDS = 60.0  # limit for a status or the end of the connection


@dataclass(slots=True)
class Outcomes:
    """Counts of messages and problems."""

    counts: Counter[str] = field(default_factory=Counter)  # messages by layer
    problems: Counter[str] = field(default_factory=Counter)
    distinct: set[int] = field(default_factory=set)  # hashes of what was sent at once
    examples: dict[str, str] = field(default_factory=dict)  # of messages, by problem

    @property
    def num_problems(self) -> int:
        """Number of problems."""
        return sum(self.problems.values())

    def answered(self, layer: str, data: bytes, num_messages: int = 1) -> None:
        """Count an answer to `data`: a status, or the end of a connection."""
        self.distinct.add(hash(data))
        self.counts[layer] += num_messages

    def failed(self, layer: str, problem: str, data: bytes, num_messages: int = 1) -> None:
        """Count a problem: no status, or one that no message may cause."""
        self.counts[layer] += num_messages
        self.problems[problem] += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.setdefault(problem, repr(data[:300]))
