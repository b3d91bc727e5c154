"""Grows the trees of many sessions together: each draft step is one model pass over all their frontiers.

It has no threads: its owner calls `start` and `step` in turn.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

from bough.concurrency.futures import settle
from bough.errors import InvalidRequest, NotFound, StaleEpoch, Unavailable
from bough.protocol.cost_curve import CostCurve
from bough.protocol.ids import ScopedId
from bough.protocol.messages import GrowCall, GrowResult, Timings
from bough.sizing.sweep_times import SweepTimes
from bough.telemetry.spans import FinishedSpan, note_span
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst
from draft_worker.candidates.candidates import StepAnswer, TemperatureScalings
from draft_worker.engine.draft_ahead import DraftAhead
from draft_worker.engine.job import DraftBackend, GrowJob
from draft_worker.engine.session_pool import SessionPool
from draft_worker.growth.grower import Grower
from draft_worker.growth.static_shape import grower_for

logger = logging.getLogger(__name__)

NANO = 1e-9
MAX_STEP_ROWS = 1024  # limit of rows of the cost curve


class PendingGrow(NamedTuple):
    """A call with the future of its answer."""

    call: GrowCall
    future: Future[GrowResult]
    arrived_ns: int
    spans: list[FinishedSpan] | None = None  # recorded for the caller's trace, if there is one


class _Running(NamedTuple):
    request: PendingGrow
    job: GrowJob
    began_ns: int

    @property
    def session_id(self) -> ScopedId:
        return self.request.call.context.session_id

    def result(self, cost: CostCurve | None) -> GrowResult:
        """The answer when the tree is done; `cost` is the cost curve of draft steps."""
        ended_ns = time.perf_counter_ns()
        timings = Timings(
            total_ns=ended_ns - self.request.arrived_ns,
            queue_ns=self.began_ns - self.request.arrived_ns,
            compute_ns=ended_ns - self.began_ns,
            num_passes=self.job.num_passes,
        )
        return GrowResult(self.job.tree(), len(self.job.session.tokens), timings, self.job.num_warm, cost)


class DraftEngine:
    """Grows trees in sessions. The least recently used session is evicted for room, which only costs time."""

    def __init__(
        self,
        draft: DraftBackend,
        vocab_size: int,
        max_children: int,
        pool: SessionPool,
        ahead_steps: int,
        scalings: TemperatureScalings,
    ) -> None:
        """`ahead_steps` limits the draft-ahead steps between two calls of a session; 0 is none."""
        self._draft, self._vocab_size, self._max_children = draft, vocab_size, max_children
        self.pool, self._ahead_steps, self.scalings = pool, ahead_steps, scalings
        self._running: dict[ScopedId, _Running] = {}
        self._waiting: deque[PendingGrow] = deque()  # waiting while sessions with growing trees have all room
        self._ahead: OrderedDict[ScopedId, DraftAhead] = OrderedDict()
        self._times = SweepTimes(1, MAX_STEP_ROWS)
        self.cost: CostCurve | None = None  # seconds of a draft step by rows; readable by any thread
        self.num_trees = 0
        self.num_nodes = 0  # of these trees, roots included
        self.step_seconds = 0.0  # of successful steps for trees
        self.num_passes = 0  # draft steps that have ended, including failed ones and draft-ahead
        self.num_warm_trees = 0  # trees that reused expansions of draft-ahead

    @property
    def kv_used_bytes(self) -> int:
        """KV bytes of sessions whose trees are growing."""
        return self.pool.used_bytes(self._running)

    @property
    def num_growing(self) -> int:
        return len(self._running)

    @property
    def is_growing(self) -> bool:
        """Whether a call waits for a tree."""
        return bool(self._running or self._waiting)

    @property
    def can_go_ahead(self) -> bool:
        return bool(self._ahead)

    def start(self, request: PendingGrow) -> None:
        """Admit a call. An earlier call of the session that is still growing fails, as its answer is out of date."""
        session_id = request.call.context.session_id
        again = f"session_id: {session_id.name!r} was called again before its tree was grown"
        self._end(session_id, Unavailable(again))
        self._ahead.pop(session_id, None)
        began_ns = time.perf_counter_ns()
        try:
            request = request._replace(call=_fitted(request.call, self.pool.window.max_expansions))
            session = self.pool.take(request.call, busy=self._running)
            if session is None:
                self._waiting.append(request)
                return
            job = GrowJob(
                session, request.call, self._max_children, self._vocab_size, self.scalings, request.arrived_ns
            )
            running = _Running(request, job, began_ns)
            self.pool.copy_prefix(session)
            note_span(request.spans, "queue", request.arrived_ns, began_ns)
        except Exception as exc:
            settle(request.future, exc)
            return
        self._running[session_id] = running
        self._go_on(running)

    def release(self, session_id: ScopedId, epoch: int = 0) -> None:
        """Forget a session, ending its calls; epoch 0 always does. Raises NotFound, or StaleEpoch for a newer epoch."""
        if epoch:
            self._require_epoch(session_id, epoch)
        is_held = session_id in self.pool
        ended = self._end(session_id, NotFound("session_id", f"{session_id.name!r} was released while its tree grew"))
        self._ahead.pop(session_id, None)
        if is_held or not ended:
            self.pool.release(session_id)

    def _require_epoch(self, session_id: ScopedId, epoch: int) -> None:
        """Check the epochs of the session and of its waiting calls."""
        epochs = [r.call.epoch for r in self._waiting if r.call.context.session_id == session_id]
        newest = max([self.pool.epoch_of(session_id), *epochs])
        if epoch < newest:
            raise StaleEpoch(f"epoch: must be at least {newest}, the session's, got {epoch}")

    def close(self) -> None:
        for session_id in [*self._running, *(request.call.context.session_id for request in self._waiting)]:
            self._end(session_id, Unavailable("the draft worker is being shut down"))

    def step(self) -> None:
        """Run one draft step for all growing trees that are still wanted; without any, a draft-ahead step."""
        for session_id, running in list(self._running.items()):
            if running.request.future.cancelled():
                del self._running[session_id]
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            if not request.future.cancelled():
                self.start(request)
        if self._running:
            self._run(list(self._running.values()))
        elif self._ahead:
            self._go_ahead()
        self.num_passes += 1

    def _run(self, parts: Sequence[_Running]) -> None:
        """Run one draft step. If it fails, run each part alone: one call's error must not fail all."""
        began_ns = time.perf_counter_ns()
        try:
            answers = self._draft.ask([running.job for running in parts])
            num_rows = frontier_rows([running.job for running in parts])
        except Exception as exc:
            if len(parts) == 1:
                self._end(parts[0].session_id, exc)
                return
            for running in parts:
                self._run([running])
            return
        for running, answer in zip(parts, answers, strict=True):
            self._go_on(running, answer, began_ns)
        seconds = (time.perf_counter_ns() - began_ns) * NANO
        self.step_seconds += seconds
        self._times.observe(num_rows, seconds)
        self.cost = self._times.curve()

    def _go_on(self, running: _Running, answer: StepAnswer | None = None, began_ns: int = 0) -> None:
        """Continue with the model's answer, if there is one, until the model is needed again or the tree is done."""
        try:
            if answer is not None:
                running.job.learn(answer)
                note_span(running.request.spans, "draft step", began_ns, attributes=running.job.step_figures())
            if running.job.advance():
                return
            result = running.result(self.cost)
            self.pool.note(running.job.session)
            self.pool.check_now_and_then()
        except Exception as exc:
            self._end(running.session_id, exc)
            return
        del self._running[running.session_id]
        self.num_trees += 1
        self.num_nodes += len(result.tree)
        self.num_warm_trees += running.job.num_warm > 0
        settle(running.request.future, result)
        if self._wants_ahead(running):
            self._ahead[running.session_id] = self._ahead_of(running, result.tree)

    def _wants_ahead(self, running: _Running) -> bool:
        growth, session = running.request.call.plan.growth, running.job.session
        return (
            self._ahead_steps > 0
            and growth.budget > 1
            and len(session.explored) > 0
            and session.has_room(2 * growth.depth + 1)
        )

    def _ahead_of(self, running: _Running, tree: Tree) -> DraftAhead:
        call = running.request.call

        def next_grower(root_token: int, num_accepted: int) -> Grower:
            likely = replace(call, root_token=root_token, round=call.round + num_accepted + 1)
            return grower_for(likely, self._max_children, self._vocab_size)

        return DraftAhead(running.job.session, call, tree, next_grower, self._ahead_steps)

    def _go_ahead(self) -> None:
        """Run one draft-ahead step for the session whose turn it is."""
        session_id, ahead = self._ahead.popitem(last=False)
        if not self.pool.holds(session_id, ahead.session):
            return
        try:
            if ahead.advance():
                (answer,) = self._draft.ask([ahead])
                ahead.learn(answer)
                self._ahead[session_id] = ahead
        except Exception:
            logger.warning(
                "session %s: draft-ahead failed; its next tree starts without cached expansions",
                session_id,
                exc_info=True,
            )

    def _end(self, session_id: ScopedId, exc: Exception) -> bool:
        """End the session's calls with an error; returns whether there were any."""
        waiting = [request for request in self._waiting if request.call.context.session_id == session_id]
        self._waiting = deque(request for request in self._waiting if request not in waiting)
        if session_id in self._running:
            waiting.append(self._running.pop(session_id).request)
        for request in waiting:
            settle(request.future, exc)
        return bool(waiting)


def frontier_rows(jobs: Sequence[GrowJob]) -> int:
    """Rows of a step that expand nodes; 0 if the step also reads context, as its time then says nothing about steps."""
    if any(job.num_context for job in jobs):
        return 0
    return sum(len(job.wanted.tokens) for job in jobs if job.wanted is not None)


def _fitted(call: GrowCall, most: int) -> GrowCall:
    """Limit the levels of a best-first tree: the session has rows for at most `most` expanded nodes.

    Raises InvalidRequest for a shape that needs more rows; a shape is not cut, as a caller chose its size.
    """
    growth = call.plan.growth
    if growth.max_expansions <= most:
        return call
    if isinstance(growth, BestFirst) and min(growth.width, growth.budget) <= most:
        return replace(call, plan=replace(call.plan, growth=growth.limited(growth.budget, growth.depth, most)))
    raise InvalidRequest("growth", f"must expand at most {most} nodes", f"{growth.max_expansions}: {growth}")
