"""The deadline of a request, and the part of it that may be spent waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

LATE_SECONDS = 1.0  # by which a worker's call outlasts the request, so that the request is late and not the worker


@dataclass(slots=True)
class Deadline:
    """Deadline of one request, and one budget for all its waits: for a place, a target and KV slots."""

    deadline: float = inf  # seconds on the monotonic clock
    queue_seconds: float = inf  # left for waiting

    @classmethod
    def of(cls, timeout_seconds: float | None, queue_seconds: float) -> Deadline:
        """Start a deadline now; without a timeout there is none."""
        return cls(inf if timeout_seconds is None else time.monotonic() + timeout_seconds, queue_seconds)

    def within(self, timeout_seconds: float) -> float:
        """Time limit of a worker's call: its own, or the rest of the request's if that is shorter."""
        return max(0.0, min(timeout_seconds, self.deadline + LATE_SECONDS - time.monotonic()))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Deduct the time that the block takes from the budget for waiting."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.queue_seconds = max(0.0, self.queue_seconds - (time.monotonic() - began))
