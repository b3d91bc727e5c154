"""What became of messages that were sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MAX_EXAMPLES = 20
ANSWER_SECONDS = 60.0  # in which every message has a status, or its connection an end


@dataclass(slots=True)
class Outcomes:
    """Answers by kind, and what should not have been."""

    counts: Counter[str] = field(default_factory=Counter)  # messages by layer
    answers: Counter[str] = field(default_factory=Counter)  # by status
    problems: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # of messages, by problem

    @property
    def num_messages(self) -> int:
        """Of all layers."""
        return sum(self.counts.values())

    @property
    def num_problems(self) -> int:
        """How often something was wrong."""
        return sum(self.problems.values())

    def answered(self, layer: str, status: str, num_messages: int = 1) -> None:
        """A status, or the end of a connection."""
        self.counts[layer] += num_messages
        self.answers[f"{layer}: {status}"] += 1

    def failed(self, layer: str, problem: str, data: bytes, num_messages: int = 1) -> None:
        """No status, or one that a message should not be able to bring about."""
        self.counts[layer] += num_messages
        self.problems[problem] += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.setdefault(problem, repr(data[:300]))

    def add(self, other: Outcomes) -> None:
        """Another's, beside these."""
        self.counts += other.counts
        self.answers += other.answers
        self.problems += other.problems
        self.examples = dict([*self.examples.items(), *other.examples.items()][:MAX_EXAMPLES])
