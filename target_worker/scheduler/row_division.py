"""Divides the rows of a sweep among its calls, without nodes that cost all calls more time than they gain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.protocol.cost_curve import CostCurve
from bough.sizing.sweep_times import seconds_at, sizes_up_to
from bough.trees.tree import Tree
from bough.trees.tree_plan import Scheme
from target_worker.scheduler.batching import Part
from target_worker.scheduler.job import VerifyJob

Floats = NDArray[np.float64]
Nodes = NDArray[np.intp]

HALF_LIFE = 20  # sweeps
IDLE = 3.0  # multiples of a sweep's time; after longer gaps between the ends of sweeps the target was idle


@dataclass(frozen=True, slots=True, eq=False)
class SweepTree:
    """A tree in a sweep, with the values of its nodes."""

    values: Floats  # (num_nodes,) acceptance probability, which is the expected tokens; never above the parent's
    parents: NDArray[np.int32]  # (num_nodes,) -1 at the root; parents come before children
    may_leave_out: bool = True

    @classmethod
    def of(cls, tree: Tree, may_leave_out: bool) -> SweepTree:
        """The values are the products of the nodes' estimates along paths: calibrated by the sender, or the draft's."""
        return cls(np.exp(tree.scores().astype(np.float64)), tree.parents, may_leave_out)

    def least(self) -> Nodes:
        """Nodes that are always kept: all, or the root and its best child."""
        if not self.may_leave_out:
            return np.arange(len(self.values))
        children = np.flatnonzero(self.parents == 0)
        return np.array([0, children[np.argmax(self.values[children])]]) if len(children) else np.zeros(1, np.intp)


class Yield(NamedTuple):
    """The recent yield of sweeps."""

    tokens_per_second: float  # as the trees' values estimate tokens
    gap_seconds: float = math.inf  # idle time between sweeps; infinite is unknown


@dataclass(slots=True)
class _Sums:
    """Exponentially decayed sums."""

    tokens: float = 0.0
    seconds: float = 0.0
    gaps: float = 0.0  # part of `seconds` between sweeps
    sweeps: float = 0.0
    brought: float = 0.0  # tokens gained from trees with an expected value
    expected: float = 0.0  # tokens expected from these trees

    def faded(self) -> _Sums:
        """The sums one sweep later."""
        return _Sums(*(0.5 ** (1 / HALF_LIFE) * getattr(self, field.name) for field in fields(self)))


class SweepYield:
    """The recent yield of a second: the tokens of all sessions of the target.

    It is a ratio of decayed sums; a mean of ratios would be dominated by short sweeps.

    Seconds are counted from the end of one sweep to the end of the next, including gaps. The ratio of expected to
    gained tokens converts the yield to the senders' estimates of tokens.
    """

    def __init__(self) -> None:
        self._sums = _Sums()
        self._last_end: float | None = None

    def answered(self, num_tokens: int, num_expected: float) -> None:
        """Record a session's answer; `num_expected` is 0 if unknown."""
        self._sums.tokens += num_tokens
        if num_expected > 0:
            self._sums.brought += num_tokens
            self._sums.expected += num_expected

    def swept(self, sweep_seconds: float, now: float) -> None:
        """Record the end of a sweep whose calls are all answered; of sweeps in flight together, each has its share."""
        passed = now - self._last_end if self._last_end is not None else sweep_seconds
        self._last_end = now
        gap = max(0.0, passed - sweep_seconds) if passed <= IDLE * sweep_seconds else 0.0
        self._sums.seconds += sweep_seconds + gap
        self._sums.gaps += gap
        self._sums.sweeps += 1
        self._sums = self._sums.faded()

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second; 0 before the first sweep."""
        return self._sums.tokens / self._sums.seconds if self._sums.seconds else 0.0

    @property
    def recent(self) -> Yield:
        """The yield for dividing a sweep among trees with estimated values."""
        sums = self._sums
        measure = sums.expected / sums.brought if sums.brought else 1.0
        return Yield(self.tokens_per_second * measure, sums.gaps / sums.sweeps if sums.sweeps else 0.0)


def divide(trees: Sequence[SweepTree], fixed_rows: int, cost: CostCurve, recent: Yield, most_rows: int) -> list[Nodes]:
    """The nodes that each tree keeps for the best yield of the sweep, ascending and closed under parents.

    It maximises the sum of values minus the sweep's seconds times their price. The sweep has at most `most_rows` rows,
    of which `fixed_rows` are contexts, and each tree keeps its `least` nodes. Nodes of all trees are taken best first,
    so parents precede children. All numbers of rows without padding are compared: seconds grow in steps, and a step
    that pays may follow one that does not. Among equals the most nodes are kept.

    The price is the larger of the recent yield and the best yield of sweeps like this one, their gaps included
    (Dinkelbach's ratio): with the recent yield alone, overlong sweeps would perpetuate themselves.
    """
    least = [tree.least() for tree in trees]
    if not any(tree.may_leave_out for tree in trees):
        return least
    begins = np.cumsum([0, *(len(tree.values) for tree in trees)])
    values = np.concatenate([tree.values for tree in trees])
    is_kept = np.zeros(len(values), np.bool_)
    for begin, nodes in zip(begins, least, strict=False):
        is_kept[begin + nodes] = True
    open_nodes = np.flatnonzero(~is_kept)
    order = open_nodes[np.argsort(-values[open_nodes], kind="stable")]
    num_rows = fixed_rows + len(values) - len(order)
    edges = _edges(num_rows, num_rows + len(order), cost, most_rows)
    gained = values[is_kept].sum() + np.append(0.0, np.cumsum(values[order]))[edges - num_rows]
    seconds = seconds_at(cost, edges)
    price = max(recent.tokens_per_second, float((gained / (seconds + recent.gap_seconds)).max()))
    worth = gained - price * seconds
    best = len(edges) - 1 - int(np.argmax(worth[::-1]))
    is_kept[order[: edges[best] - num_rows]] = True
    return [np.flatnonzero(is_kept[begin:end]) for begin, end in pairwise(begins)]


def _edges(least: int, all_rows: int, cost: CostCurve, most_rows: int) -> NDArray[np.int64]:
    """Numbers of rows to compare, ascending from `least`."""
    edges = sizes_up_to(cost, max(least, min(all_rows, most_rows)))
    return np.append(least, edges[edges > least])


def may_leave_out(job: VerifyJob) -> bool:
    """Whether any subset of the tree may be verified; sampled schemes need the whole sample."""
    call = job.call
    is_sample = call.tree.draft_probs is not None or call.tree.draws is not None
    return call.may_leave_out and call.scheme is Scheme.TARGET and not is_sample


def expected_tokens(job: VerifyJob) -> float:
    """Expected tokens from the tree's nodes in the sweep, as its sender estimates them; 0 for samples."""
    return float(SweepTree.of(job.tree, True).values.sum()) if may_leave_out(job) else 0.0


def make_fit(jobs: Iterable[VerifyJob], cost: CostCurve | None, recent: Yield, most_rows: int) -> None:
    """Restore nodes that were left out earlier; if all ready trees together exceed a sweep, cut them to fit."""
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
