"""Decides when latency has risen under a climbing load; independent of locust, so that tests need none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.locust.samples import Sample, percentile

LEAST_SAMPLES = 3  # finished requests of a step before it is judged


@dataclass(slots=True)
class Climb:
    """Raises the number of users step by step until TTFT rises, or requests are refused.

    A step is judged by requests that began with all of its users: one that only ended in it says what fewer users get.
    """

    step_users: int
    step_seconds: float
    max_users: int
    bend: float  # factor of the first step's p95 at which latency counts as risen
    most_seconds: float = math.inf  # after which the run ends, whatever was found
    users: int = 0
    bent_at: int = 0  # users at which latency rose; 0 if it has not
    _step_began: float = 0.0
    _first_p95: float = 0.0
    _taken: int = 0
    steps: list[tuple[int, float]] = field(default_factory=list)  # users, and p95 of TTFT in seconds

    def users_at(self, seconds: float, samples: Sequence[Sample]) -> int | None:
        """The number of users at a moment of the run, given all samples so far; None ends the run."""
        if seconds >= self.most_seconds:
            return None
        if self.users == 0:
            self.users, self._step_began = min(self.step_users, self.max_users), seconds
            return self.users
        if seconds - self._step_began < self.step_seconds:
            return self.users
        recent = [sample for sample in samples[self._taken :] if sample.users >= self.users]
        finished = [sample.first_token_seconds for sample in recent if not sample.error]
        is_refused = any(sample.is_refused for sample in recent)
        if len(finished) < LEAST_SAMPLES and not is_refused:
            return self.users  # answers take longer than a step, so it continues
        p95 = percentile(finished, 95)
        self.steps.append((self.users, p95))
        self._first_p95 = self._first_p95 or p95
        if is_refused or p95 > self.bend * self._first_p95:
            self.bent_at = self.users
            return None
        if self.users + self.step_users > self.max_users:
            return None
        self.users, self._step_began, self._taken = self.users + self.step_users, seconds, len(samples)
        return self.users
