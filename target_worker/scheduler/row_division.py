"""Divides the rows of a sweep among its calls: nodes that do not pay for the time of all calls are left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bough.protocol.cost_curve import CostCurve
from bough.sizing.division import SweepTree, Yield, divide
from bough.trees.tree_plan import Scheme
from target_worker.scheduler.batching import Part
from target_worker.scheduler.job import VerifyJob


def may_leave_out(job: VerifyJob) -> bool:
    """Whether any subset of the tree may be verified; sampled schemes need the whole sample."""
    call = job.call
    is_sample = call.tree.draft_probs is not None or call.tree.draws is not None
    return call.may_leave_out and call.scheme is Scheme.TARGET and not is_sample


def expected_tokens(job: VerifyJob) -> float:
    """Expected tokens from the tree's nodes in the sweep, as its sender estimates them; 0 for samples."""
    return float(SweepTree.of(job.tree, True).values.sum()) if may_leave_out(job) else 0.0


def make_fit(jobs: Iterable[VerifyJob], cost: CostCurve | None, recent: Yield, most_rows: int) -> None:
    """Restore nodes left out before; if all ready trees together exceed a sweep, cut them to fit."""
    ready = []
    for job in jobs:
        job.keep(None)
        if job.num_remaining == 0:
            ready.append(job)
    if cost is not None and len(ready) > 1 and sum(job.num_nodes for job in ready) > most_rows:
        _divide(ready, 0, cost, recent, most_rows)


def share_rows(parts: Sequence[Part[VerifyJob]], cost: CostCurve | None, recent: Yield, most_rows: int) -> None:
    """Keep only nodes that pay in a sweep shared with other trees and contexts.

    A call alone in a sweep keeps its whole tree, whose size was decided when it grew.
    """
    if cost is not None and len(parts) > 1:
        num_context = sum(part.num_context for part in parts)
        _divide([part.job for part in parts if part.has_tree], num_context, cost, recent, most_rows)


def _divide(jobs: Sequence[VerifyJob], fixed_rows: int, cost: CostCurve, recent: Yield, most_rows: int) -> None:
    if not any(may_leave_out(job) for job in jobs):
        return
    trees = [SweepTree.of(job.call.tree, may_leave_out(job)) for job in jobs]
    for job, nodes in zip(jobs, divide(trees, fixed_rows, cost, recent, most_rows), strict=True):
        job.keep(nodes if len(nodes) < len(job.call.tree) else None)
