"""Calls that share a sweep share its rows: nodes that are not worth their time to all of them are left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bough.protocol.cost_curve import CostCurve
from bough.sizing.division import Price, Rider, divide
from bough.trees.tree_plan import Scheme
from target_worker.scheduler.batching import Part
from target_worker.scheduler.job import VerifyJob


def may_leave_out(job: VerifyJob) -> bool:
    """Whether any part of its tree will do: by other schemes than the target's a sample must stay whole."""
    call = job.call
    is_sample = call.tree.draft_probs is not None or call.tree.draws is not None
    return call.may_leave_out and call.scheme is Scheme.TARGET and not is_sample


def expected_tokens(job: VerifyJob) -> float:
    """By what of a tree goes into a sweep, valued as its draft does; 0 for samples, of which that says little."""
    return float(Rider.of(job.tree, True).values.sum()) if may_leave_out(job) else 0.0


def make_fit(jobs: Iterable[VerifyJob], cost: CostCurve | None, price: Price, most_rows: int) -> None:
    """Takes back what was left out before; where all trees that wait together do not fit a sweep, cuts them to it."""
    ready = []
    for job in jobs:
        job.keep(None)
        if job.num_left == 0:
            ready.append(job)
    if cost is not None and len(ready) > 1 and sum(job.num_nodes for job in ready) > most_rows:
        _divide(ready, 0, cost, price, most_rows)


def share_rows(parts: Sequence[Part[VerifyJob]], cost: CostCurve | None, price: Price, most_rows: int) -> None:
    """Has the jobs of a sweep keep the nodes that pay, beside others' nodes and pieces of contexts.

    Whoever is alone in a sweep keeps the whole tree: its size was decided where its growth is known.
    """
    if cost is not None and len(parts) > 1:
        num_context = sum(part.num_context for part in parts)
        _divide([part.job for part in parts if part.has_tree], num_context, cost, price, most_rows)


def _divide(jobs: Sequence[VerifyJob], fixed_rows: int, cost: CostCurve, price: Price, most_rows: int) -> None:
    if not any(may_leave_out(job) for job in jobs):
        return
    riders = [Rider.of(job.call.tree, may_leave_out(job)) for job in jobs]
    for job, nodes in zip(jobs, divide(riders, fixed_rows, cost, price, most_rows), strict=True):
        job.keep(nodes if len(nodes) < len(job.call.tree) else None)
