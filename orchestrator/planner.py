"""How large a tree to grow. A planner sees what rounds took and came to, and says what the next one should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


class Rest(NamedTuple):
    """What a sweep computes beside a tree."""

    num_sessions: int = 1  # that run at the target, this one included
    num_context: int = 0  # tokens before the tree that the target does not hold


class Planner(Protocol):
    """Decides the size of every round's tree."""

    def plan(self, session_id: str, num_left: int, speculation: Speculation, rest: Rest) -> TreePlan:
        """For a session that wants `num_left` more tokens at most; NO_TREE is plain decoding."""
        ...

    def observe(self, session_id: str, outcome: RoundOutcome) -> None:
        """One round is over."""
        ...

    def forget(self, session_id: str) -> None:
        """The session has ended."""
        ...


class FixedPlanner:
    """Always the same size, but for what the request itself asks, and for what else is in the same sweep.

    Up to `sweep_nodes` a sweep costs the same; beyond, it costs as much more as it is larger. The first few nodes of a
    tree bring far more than its last ones, so these are the first to go where there are other sessions to share with,
    or a prompt to be read.
    """

    def __init__(self, size: BestFirst, sweep_nodes: int) -> None:
        self._size = size
        self._sweep_nodes = sweep_nodes

    def plan(self, session_id: str, num_left: int, speculation: Speculation, rest: Rest) -> TreePlan:
        """The configured size, overridden field by field by the request; no tree where no token is left to guess."""
        if speculation.disabled or num_left <= 1:
            return NO_TREE
        share = max(MIN_SHARE, self._sweep_nodes // max(1, rest.num_sessions) - rest.num_context)
        budget = speculation.budget or min(self._size.budget, share)
        narrow = min(self._size.width, max(MIN_SHARE, budget // 2))  # more at once would hardly save a step
        growth = speculation.growth or BestFirst(
            budget, speculation.width or narrow, speculation.depth or self._size.depth
        )
        return TreePlan(growth, speculation.scheme, speculation.guess) if growth.budget > 1 else NO_TREE

    def observe(self, session_id: str, outcome: RoundOutcome) -> None:
        """Learns nothing."""

    def forget(self, session_id: str) -> None:
        """Has nothing to forget."""
