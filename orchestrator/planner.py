"""How large a tree to grow. A planner sees what rounds took and came to, and says what the next one should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bough.generation import Speculation
from bough.messages import RoundTimings, TreeLimits

NO_TREE = TreeLimits(budget=1, width=1, depth=1)


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a planner learns from: the size that was planned, and what became of it."""

    limits: TreeLimits
    num_nodes: int  # of the verified tree
    tree_depth: int
    num_accepted: int
    timings: RoundTimings


class Planner(Protocol):
    """Decides the size of every round's tree."""

    def plan(self, session_id: str, num_left: int, speculation: Speculation) -> TreeLimits:
        """For a session that wants `num_left` more tokens at most; NO_TREE is plain decoding."""
        ...

    def observe(self, session_id: str, outcome: RoundOutcome) -> None:
        """One round is over."""
        ...

    def forget(self, session_id: str) -> None:
        """The session has ended."""
        ...


class FixedPlanner:
    """Always the same size, but for what the request itself asks and the tokens that it still wants."""

    def __init__(self, limits: TreeLimits) -> None:
        self._limits = limits

    def plan(self, session_id: str, num_left: int, speculation: Speculation) -> TreeLimits:
        """The configured size, overridden field by field by the request; no deeper than tokens are left to guess."""
        if speculation.disabled or num_left <= 1:
            return NO_TREE
        budget = speculation.budget or self._limits.budget
        depth = min(speculation.depth or self._limits.depth, num_left - 1)
        return TreeLimits(budget, speculation.width or self._limits.width, depth) if budget > 1 else NO_TREE

    def observe(self, session_id: str, outcome: RoundOutcome) -> None:
        """Learns nothing."""

    def forget(self, session_id: str) -> None:
        """Has nothing to forget."""
