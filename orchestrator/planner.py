"""How large a tree to grow. A planner sees what rounds took and came to, and says what the next one should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bough.generation import Speculation
from bough.growth import NO_TREE, BestFirst, TreePlan
from bough.messages import RoundTimings


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a planner learns from: the size that was planned, and what became of it."""

    plan: TreePlan
    num_nodes: int  # of the verified tree
    tree_depth: int
    num_accepted: int
    timings: RoundTimings


class Planner(Protocol):
    """Decides the size of every round's tree."""

    def plan(self, session_id: str, num_left: int, speculation: Speculation) -> TreePlan:
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

    def __init__(self, size: BestFirst) -> None:
        self._size = size

    def plan(self, session_id: str, num_left: int, speculation: Speculation) -> TreePlan:
        """The configured size, overridden field by field by the request; no deeper than tokens are left to guess."""
        if speculation.disabled or num_left <= 1:
            return NO_TREE
        growth = speculation.growth or BestFirst(
            speculation.budget or self._size.budget,
            speculation.width or self._size.width,
            min(speculation.depth or self._size.depth, num_left - 1),
        )
        return TreePlan(growth, speculation.scheme, speculation.guess) if growth.budget > 1 else NO_TREE

    def observe(self, session_id: str, outcome: RoundOutcome) -> None:
        """Learns nothing."""

    def forget(self, session_id: str) -> None:
        """Has nothing to forget."""
