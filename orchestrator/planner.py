"""How large a tree to grow. A planner sees what rounds took and came to, and says what the next one should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bough.generation import Speculation
from bough.growth import NO_TREE, BestFirst, TreePlan
from bough.messages import RoundTimings

MIN_SHARE = 4  # nodes of a tree, however many sessions there are


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

    def plan(self, session_id: str, num_left: int, speculation: Speculation, num_sharing: int) -> TreePlan:
        """For a session that wants `num_left` more tokens at most; NO_TREE is plain decoding.

        `num_sharing` sessions run at its target, this one included.
        """
        ...

    def observe(self, session_id: str, outcome: RoundOutcome) -> None:
        """One round is over."""
        ...

    def forget(self, session_id: str) -> None:
        """The session has ended."""
        ...


class FixedPlanner:
    """Always the same size, but for what the request itself asks, and for other sessions in the same sweep.

    Up to `sweep_nodes` a sweep costs the same; beyond, it costs as much more as it is larger. The first few nodes of a
    tree bring far more than its last ones, so these are the first to go where there are others to share with.
    """

    def __init__(self, size: BestFirst, sweep_nodes: int) -> None:
        self._size = size
        self._sweep_nodes = sweep_nodes

    def plan(self, session_id: str, num_left: int, speculation: Speculation, num_sharing: int) -> TreePlan:
        """The configured size, overridden field by field by the request; no deeper than tokens are left to guess."""
        if speculation.disabled or num_left <= 1:
            return NO_TREE
        share = max(MIN_SHARE, self._sweep_nodes // max(1, num_sharing))
        growth = speculation.growth or BestFirst(
            speculation.budget or min(self._size.budget, share),
            speculation.width or self._size.width,
            min(speculation.depth or self._size.depth, num_left - 1),
        )
        return TreePlan(growth, speculation.scheme, speculation.guess) if growth.budget > 1 else NO_TREE

    def observe(self, session_id: str, outcome: RoundOutcome) -> None:
        """Learns nothing."""

    def forget(self, session_id: str) -> None:
        """Has nothing to forget."""
