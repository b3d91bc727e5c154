"""Counts of attempts and controls."""

from __future__ import annotations

from collections.abc import Awaitable, Collection
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Counts attempts, successful attempts, controls, and refused controls."""

    num_attempts: int = 0
    admitted: list[str] = field(default_factory=list)
    num_controls: int = 0
    locked_out: list[str] = field(default_factory=list)

    def attempt(self, what: str, outcome: str, refusals: Collection[str]) -> None:
        """Count an unauthorised attempt; `outcome` is its status, which must be one of `refusals`."""
        self.num_attempts += 1
        if outcome not in refusals:
            self.admitted.append(f"{what}: {outcome}")

    def control(self, what: str, outcome: str, admissions: Collection[str]) -> None:
        """Count an authorised call, which must succeed; otherwise a server that refuses everything would look safe."""
        self.num_controls += 1
        if outcome not in admissions:
            self.locked_out.append(f"{what}: {outcome}")

    async def attempted(self, what: str, outcome: Awaitable[str], refusals: Collection[str]) -> None:
        """Await the outcome of an unauthorised attempt and count it; it must be one of `refusals`."""
        self.attempt(what, await outcome, refusals)

    @property
    def is_safe(self) -> bool:
        """Whether all attempts were refused, and all controls succeeded."""
        return self.num_attempts > 0 and not self.admitted and not self.locked_out
