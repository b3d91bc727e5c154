"""A call on its way through one or more sweeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bough.concurrency.futures import settle
from bough.model.kv.slot import Segment, Slot
from bough.protocol.cost_curve import CostCurve
from bough.protocol.messages import Timings, Verdict, VerifyCall, VerifyResult
from bough.sizing.row_counts import RowCounts
from bough.sizing.sweep_times import SweepTimes
from bough.telemetry.spans import NOTED_SPANS, FinishedSpan, note_span
from bough.trees.tree import Tree
from target_worker.kv.slot_index import SessionSlot, Text
from target_worker.scheduler.batching import Part

NANO = 1e-9


class SweepShare(NamedTuple):
    """A call's view of the sweep that verified its tree."""

    num_rows: int  # of all calls together
    num_trees: int
    cost: CostCurve | None  # of sweeps, this one included
    spans: Sequence[FinishedSpan] = ()  # parts of the sweep
    expert_ratio: float = 0.0  # see Timings; expected before the sweep

    @classmethod
    def of(cls, parts: Sequence[Part[Any]], cost: CostCurve | None, spans: Sequence[FinishedSpan] = ()) -> SweepShare:
        """The calls' shares of a sweep of `parts`."""
        return cls(sum(part.num_tokens for part in parts), sum(part.has_tree for part in parts), cost, spans)


@dataclass(slots=True, eq=False)
class VerifyJob:
    """State of a call: what remains to be computed, and who waits for the answer."""

    call: VerifyCall
    session: SessionSlot
    text: Text  # before the root
    futures: list[Future[VerifyResult]]
    arrived_ns: int
    num_computed: int = 0  # tokens of the text that sweeps have computed for it
    num_sweeps_skipped: int = 0  # consecutive sweeps without a part of this call
    timings: Timings = field(default_factory=Timings)
    context: Context = field(default_factory=copy_context)  # contextvars of the caller, for the log
    spans: list[FinishedSpan] | None = field(default_factory=NOTED_SPANS.get)  # recorded for the caller's trace
    tree: Tree = field(init=False)  # the nodes that go into a sweep, renumbered
    _nodes_in_sweep: NDArray[np.intp] | None = None  # nodes of the call's tree that are in `tree`; None is all

    def __post_init__(self) -> None:
        self.tree = self.call.tree

    def keep(self, nodes: NDArray[np.intp] | None) -> None:
        """Keep only these nodes of the tree, with the parent of each; None keeps all."""
        self._nodes_in_sweep = nodes
        self.tree = self.call.tree if nodes is None else self.call.tree.only(nodes)

    @property
    def num_cached(self) -> int:
        """Tokens of the text whose keys and values are cached."""
        return self.session.slot.length

    @property
    def num_remaining(self) -> int:
        """Tokens of the text that are not cached yet."""
        return len(self.text.tokens) - self.session.slot.length

    @property
    def num_nodes(self) -> int:
        """Nodes of the tree that go into a sweep, all in the same one."""
        return len(self.tree)

    @property
    def num_in_sweep(self) -> int:
        """Its rows in a sweep in flight; 0 if there is none."""
        return self.session.slot.num_in_sweep

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits for the answer."""
        return not all(future.cancelled() for future in self.futures)

    def segments(self, num_context: int, has_tree: bool) -> list[Segment]:
        """The call's rows in a sweep."""
        slot, begin = self.session.slot, self.num_cached
        segments = [Segment.context(slot, begin, self.text.tokens[begin : begin + num_context])]
        return [*segments, Segment.tree(slot, len(self.text.tokens), self.tree)] if has_tree else segments

    def swept(self, num_context: int, timings: Timings, began_ns: int, share: SweepShare) -> None:
        """Record a part in a sweep."""
        before = self.timings
        if not before.num_passes:
            note_span(self.spans, "queue", self.arrived_ns, began_ns)
        if self.spans is not None:
            ended_ns = began_ns + timings.total_ns
            note_span(self.spans, "sweep", began_ns, ended_ns, sweep_attributes(num_context, timings, share))
            self.spans += share.spans
        self.num_computed += num_context
        self.num_sweeps_skipped = 0
        queue_ns = before.queue_ns if before.num_passes else began_ns - self.arrived_ns
        self.timings = replace(before + timings, queue_ns=queue_ns)

    def verdict(self, verdict_on: Callable[[VerifyJob], Verdict]) -> Verdict:
        """Compute the verdict on the tree."""
        began_ns = time.perf_counter_ns()
        verdict = verdict_on(self)
        note_span(self.spans, "verdict", began_ns)
        return verdict

    def result(self, verdict: Verdict, share: SweepShare, total_ns: int) -> VerifyResult:
        """Convert a verdict on `tree` to the node numbers of the tree that was sent."""
        left_out: tuple[int, ...] = ()
        if (kept := self._nodes_in_sweep) is not None:
            verdict = verdict._replace(accepted_nodes=tuple(kept[list(verdict.accepted_nodes)].tolist()))
            left_out = tuple(np.setdiff1d(np.arange(len(self.call.tree)), kept).tolist())
        timings = replace(self.timings, total_ns=total_ns)
        return VerifyResult(
            verdict,
            self.num_cached,
            timings,
            cached_length=len(self.text.tokens) - self.num_computed,
            left_out_nodes=left_out,
            cost=share.cost,
            num_rows=share.num_rows,
            num_trees=share.num_trees,
            expected_expert_ratio=share.expert_ratio,
        )

    def settle(self, outcome: VerifyResult | Exception) -> None:
        """Send the outcome to all that still wait."""
        for future in self.futures:
            settle(future, outcome)


def sweep_attributes(num_context: int, timings: Timings, share: SweepShare) -> dict[str, int | float]:
    """Span attributes: where a sweep's time went. Waiting and computing alternate, layer by layer."""
    return {
        "bough.sweep.rows": share.num_rows,
        "bough.sweep.trees": share.num_trees,
        "bough.sweep.context_tokens": num_context,
        "bough.sweep.wait_seconds": timings.wait_ns * NANO,
        "bough.sweep.compute_seconds": (timings.compute_ns) * NANO,
        "bough.sweep.link_seconds": timings.link_ns * NANO,
        "bough.sweep.link_bytes": timings.link_bytes,
        "bough.sweep.link_efficiency": timings.link_ideal_ns / timings.total_ns if timings.total_ns else 0.0,
    }


class Swept(NamedTuple):
    """Result of a sweep."""

    timings: Timings  # link figures are those since the last sweep ended: reads run ahead, so some are for later sweeps
    verdict_on: Callable[[VerifyJob], Verdict]  # verdict on a tree of the sweep; raises errors of that call alone
    kv_bytes: int = 0  # KV copied between host and device
    spans: Sequence[FinishedSpan] = ()  # parts of the sweep, for traces


class SweepInFlight(NamedTuple):
    """A sweep that goes on at other machines, while the sweep thread may begin the next one."""

    arrived: Future[Any]  # done, with any outcome, once `finish` need not wait; in the order of sweeps
    finish: Callable[[], Swept]  # on the sweep thread; raises what `Sweeper.sweep` does


class Sweeper(Protocol):
    """A streamed or simulated model, used by the sweep thread only."""

    rows: RowCounts  # rows computed together by a layer, and their padding

    def sweep(self, parts: Sequence[Part[VerifyJob]]) -> Swept | SweepInFlight:
        """Compute the parts and write their rows to their sessions' slots. Errors go to all of their calls.

        Verdicts are available until the next sweep begins or is finished.
        """

    def warm_up(self, slot: Slot, most_rows: int) -> SweepTimes | None:
        """Run a first pass over rows of a slot, which compiles and allocates; raises errors of `bough.errors`.

        Returns what sweeps of up to `most_rows` rows are expected to take; None if unknown.
        """
