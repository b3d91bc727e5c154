"""What attempts came to."""

from __future__ import annotations

from collections.abc import Awaitable, Collection
from dataclasses import dataclass, field

MAX_TOLD = 20


@dataclass(slots=True)
class Tally:
    """Attempts, those that got anything but a refusal, and what should be let in and was not."""

    num_attempts: int = 0
    admitted: list[str] = field(default_factory=list)
    num_controls: int = 0
    locked_out: list[str] = field(default_factory=list)

    def attempt(self, what: str, outcome: str, refusals: Collection[str]) -> None:
        """Somebody who may not has tried; `outcome` is the status, of which `refusals` are right."""
        self.num_attempts += 1
        if outcome not in refusals:
            self.admitted.append(f"{what}: {outcome}")

    def control(self, what: str, outcome: str, admissions: Collection[str]) -> None:
        """Somebody who may has tried: without these a door that lets nobody in would look safe."""
        self.num_controls += 1
        if outcome not in admissions:
            self.locked_out.append(f"{what}: {outcome}")

    async def attempted(self, what: str, outcome: Awaitable[str], refusals: Collection[str]) -> None:
        """As `attempt`, once it is known."""
        self.attempt(what, await outcome, refusals)

    @property
    def is_safe(self) -> bool:
        """Whether nobody got in who may not, and everybody who may."""
        return self.num_attempts > 0 and not self.admitted and not self.locked_out

    def figures(self) -> dict[str, object]:
        """As they are printed."""
        return {
            "attempts": self.num_attempts,
            "admitted": len(self.admitted),
            "admitted_examples": self.admitted[:MAX_TOLD],
            "controls": self.num_controls,
            "locked_out": self.locked_out[:MAX_TOLD],
        }
