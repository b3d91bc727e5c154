"""Where a session is."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from orchestrator.directory import Known
from orchestrator.workers import TargetClient


@dataclass(slots=True)
class Seat:
    """A running session's place at a target, which counts it for as long as the block lasts."""

    target: Known[TargetClient]

    def __enter__(self) -> Seat:
        self.target.num_running += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.target.num_running -= 1

    def move(self, target: Known[TargetClient]) -> None:
        """Another target has it from now on."""
        self.target.num_running -= 1
        self.target = target
        target.num_running += 1
