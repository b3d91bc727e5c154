"""Counts of accepted and rejected guesses, by depth and rank."""

from __future__ import annotations

from dataclasses import dataclass

from bough.trees.tree_plan import Scheme


@dataclass(frozen=True, slots=True)
class DepthCounts:
    """Outcomes for the children of nodes at one depth, as node counts in which older nodes may weigh less."""

    accepted: tuple[float, ...]  # (num_ranks,) [k]: the child of rank k was accepted
    rejected: tuple[float, ...]  # (num_ranks,) [k]: there were k + 1 children, and none was accepted


@dataclass(frozen=True, slots=True)
class SchemeAcceptance:
    """Acceptance counts that a running system collected for one verification scheme."""

    scheme: Scheme
    num_rounds: int  # rounds whose tree had more than its root, including rounds that no longer weigh in the counts
    depths: tuple[DepthCounts, ...]
