"""The sweep thread: takes every call that waits, packs their trees into one batch, sweeps, and answers.

All slots and the model belong to this thread; the services talk to it through a queue of jobs and get futures back.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from bough.concurrency.futures import PendingCalls, settle
from bough.errors import AcceleratorFull, BoughError, StaleEpoch, Unavailable
from bough.model.sizes.target_limits import TargetLimits
from bough.protocol.cost_curve import CostCurve
from bough.protocol.messages import Verdict, VerifyCall, VerifyResult
from bough.sizing.sweep_times import SweepTimes
from target_worker.kv.slot_pool import SlotPool
from target_worker.scheduler.batch_delay import BatchDelay
from target_worker.scheduler.batching import Part
from target_worker.scheduler.job import SweepShare, VerifyJob
from target_worker.scheduler.prefix_sharing import choose_shared
from target_worker.scheduler.price import TokenPrice
from target_worker.scheduler.request_queue import CallQueue
from target_worker.scheduler.row_division import expected_tokens, make_fit, share_rows
from target_worker.scheduler.stall_watch import StallWatch
from target_worker.scheduler.sweep_figures import SweepFigures
from target_worker.scheduler.sweeper import Sweeper, Swept

logger = logging.getLogger(__name__)

NANO = 1e-9
SHUT_DOWN = "the target worker is being shut down"


class SweepEngine:
    """Verifies trees of many sessions, one sweep at a time."""

    def __init__(
        self,
        sweeper: Sweeper,
        pool: SlotPool,
        limits: TargetLimits,
        max_waiting: int,
        patience: float = 0.0,
        observe: Callable[[int, SweepFigures], None] = lambda *_: None,
        progress: Callable[[], int] | None = None,
    ) -> None:
        """At most `max_waiting` calls at once; for `patience` see `BatchDelay`.

        `observe` hears of every sweep, on the sweep thread: its tokens, and where its time went. `progress` grows
        while one gets on; without it nobody looks.
        """
        self.pool = pool
        self.num_running = 0  # calls that have a part in the sweep that is under way
        self.num_passes = 0  # sweeps that have ended, well or not
        self._observe = observe
        self._sweeper = sweeper
        self._limits = limits
        self._unanswered = PendingCalls(max_waiting)
        self._times = SweepTimes(sweeper.rows.step, limits.max_sweep_tokens)
        self.cost: CostCurve | None = None  # seconds of a sweep by its rows; any thread may read this
        self._most_tokens = limits.max_sweep_tokens  # of a sweep; fewer once there was no memory for more
        self._stillness = StallWatch(progress) if progress else None
        self._gathering = BatchDelay(patience)
        self._calls = CallQueue(pool, limits, self._gathering.left)
        self._price = TokenPrice()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_over = False
        self._idle_since = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)

    def start(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Starts the thread; `prepare` is called on it before anything else."""
        self._inbox.put(prepare)
        self._thread.start()

    def warm_up(self) -> Future[None]:
        """Has the sweeper compute once for nobody; the future raises what keeps it from that."""
        future: Future[None] = Future()

        def run() -> None:
            with self.pool.scratch(min(self._sweeper.rows.most, self._limits.slot_rows)) as slot:
                prior = self._sweeper.warm_up(slot)
            if prior is not None:
                self._times = SweepTimes(self._sweeper.rows.step, self._limits.max_sweep_tokens, prior)
                self.cost = self._times.curve()
            settle(future, None)

        self._post(future, run)
        return future

    def stop(self) -> None:
        """Ends the thread after the sweep that is under way; calls that still wait, or come later, are Unavailable."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def num_waiting(self) -> int:
        """CallQueue without an answer that have no part in a sweep."""
        return max(0, len(self._unanswered) - self.num_running)

    @property
    def idle_seconds(self) -> float:
        """Since the last sweep; 0 while one is under way. Any thread."""
        return 0.0 if self.num_running else time.monotonic() - self._idle_since

    def trouble(self) -> str:
        """What keeps a sweep from getting on, in words; empty where nothing does. One thread may ask."""
        return self._stillness.trouble(self.num_running > 0) if self._stillness else ""

    def verify(self, call: VerifyCall) -> Future[VerifyResult]:
        """Queues a call; any thread may call this. The future raises what `bough.errors` names.

        Cancelled, the call leaves before the next sweep, if nobody else waits for its answer.
        """
        future: Future[VerifyResult] = Future()
        arrived_ns = time.perf_counter_ns()
        try:
            self._unanswered.add(future)
        except BoughError as exc:
            settle(future, exc)
            return future
        self._post(future, lambda: self._admit(call, future, arrived_ns))
        return future

    def release(self, session_id: str, epoch: int = 0) -> Future[None]:
        """Forgets a session, after the sweep that is under way.

        With an `epoch`, only if no newer one has begun: the future raises StaleEpoch then.
        """
        future: Future[None] = Future()

        def run() -> None:
            session = self.pool.get(session_id)
            if epoch and session is not None:
                session.require_epoch(epoch)
            self._calls.drop(session_id, StaleEpoch(f"session_id: {session_id!r} was released"))
            self._gathering.left(session_id)
            self.pool.release(session_id)
            settle(future, None)

        self._post(future, run)
        return future

    def drain(self) -> Future[None]:
        """Refuses new sessions from now on; done when no call is without an answer."""
        self._calls.is_draining = True
        return self._unanswered.when_idle()

    def _post(self, future: Future[Any], act: Callable[[], None]) -> None:
        """Has the sweep thread do something; what goes wrong is told to whoever waits on the future."""

        context = copy_context()  # whose request it is, for the log and for traces

        def run() -> None:
            try:
                if self._is_over:
                    raise Unavailable(SHUT_DOWN)
                context.run(act)
            except Exception as exc:
                settle(future, exc)

        self._inbox.put(run)
        if self._is_over:
            self._refuse_mail()

    def _refuse_mail(self) -> None:
        """What comes when the thread has ended, from whichever thread: each piece is taken once."""
        with suppress(queue.Empty):
            while True:
                if (mail := self._inbox.get_nowait()) is not None:
                    mail()

    # Below here everything runs on the sweep thread.

    def _run(self) -> None:
        while self._take_mail():
            if parts := self._prepare():
                self._sweep(parts)
        self._calls.drop_all(Unavailable(SHUT_DOWN))
        self._is_over = True
        self._refuse_mail()

    def _take_mail(self) -> bool:
        """Acts on all mail, waiting for some while there is nothing to sweep; False once told to stop."""
        self._calls.drop_unwanted()  # whose slots those that come may need
        while True:
            seconds = self._gathering.seconds(time.perf_counter(), self._calls.by_caller()) if self._calls else None
            try:
                mail = self._inbox.get(timeout=seconds)
            except queue.Empty:
                return True
            if mail is None:
                return False
            mail()

    def _admit(self, call: VerifyCall, future: Future[VerifyResult], arrived_ns: int) -> None:
        if future.cancelled():
            return
        self._calls.admit(call, future, arrived_ns)  # a call that is refused is no news of its session
        self._gathering.arrived(call.context.session_id, arrived_ns * NANO, call.caller, call.num_running)

    def _prepare(self) -> list[Part[VerifyJob]]:
        """What goes into the next sweep."""
        try:
            self._calls.drop_unwanted()
            self._calls.borrow()
            return self._choose()
        except Exception as exc:  # the thread outlives this as well
            logger.exception("a sweep could not be prepared")
            self._calls.drop_all(exc)
            return []

    def _choose(self) -> list[Part[VerifyJob]]:
        jobs = [*self._calls]
        chunk, cost = self._sweeper.rows.most, self.cost
        knee = max(self._times.knee, chunk)  # that much is computed at once, and how long rows take is seen there
        price, most = self._price.price, self._most_tokens
        make_fit(jobs, cost, price, most)
        parts = choose_shared(jobs, most, knee, chunk, cost or (lambda _: 0.0))
        share_rows(parts, cost, price, most)
        for job in jobs:
            job.num_passed_over += 1
        return parts

    def _sweep(self, parts: Sequence[Part[VerifyJob]]) -> None:
        began_ns = time.perf_counter_ns()
        self.num_running = len(parts)
        try:
            num_tokens = sum(part.num_tokens for part in parts)
            swept = self._sweeper.sweep(parts)
            self._observe_times(num_tokens, swept.figures)
            self._gathering.swept(swept.figures.total_ns * NANO)
            self._observe(num_tokens, swept.figures)
            self._finish(parts, swept, began_ns)
        except Exception as exc:  # the thread outlives whatever a sweep can do; its callers are told
            if isinstance(exc, AcceleratorFull) and self._shrink(sum(part.num_tokens for part in parts), exc):
                return
            logger.exception("a sweep failed")
            for part in parts:
                self._calls.drop(part.job.call.context.session_id, exc)
        finally:
            self._idle_since = time.monotonic()
            self.num_running = 0
            self.num_passes += 1

    def _shrink(self, num_tokens: int, exc: AcceleratorFull) -> bool:
        """Has sweeps be smaller from now on than one for which there was no memory; False where they cannot be."""
        least = max(self._limits.max_nodes, self._sweeper.rows.most)
        if num_tokens <= least:
            return False
        self._most_tokens = max(least, num_tokens // 2)
        logger.warning("%s; sweeps have at most %d tokens from now on, not %d", exc, self._most_tokens, num_tokens)
        return True

    def _observe_times(self, num_rows: int, figures: SweepFigures) -> None:
        self._times.observe(num_rows, figures.total_ns * NANO, figures.wait_ns * NANO, figures.link_bytes)
        self.cost = self._times.curve()

    def _finish(self, parts: Sequence[Part[VerifyJob]], swept: Swept, began_ns: int) -> None:
        share = SweepShare.of(parts, self.cost)
        for job, num_context, has_tree in parts:
            begin = job.num_held
            rows = range(begin, begin + num_context)
            self.pool.commit(job.session, rows, job.text.tokens[begin : begin + num_context])
            job.swept(num_context, swept.figures, began_ns, share)
            if has_tree:
                try:
                    self._answer(job, job.judged(swept.verdict_on), share)
                except Exception as exc:  # of one call: no reason for the others to go without an answer
                    if not isinstance(exc, BoughError):
                        job.context.run(logger.exception, "a verdict failed")
                    self._calls.drop(job.call.context.session_id, exc)
        self._price.swept(swept.figures.total_ns * NANO, time.perf_counter())
        self.pool.check_integrity()

    def _answer(self, job: VerifyJob, verdict: Verdict, share: SweepShare) -> None:
        tree, base = job.tree, len(job.text.tokens)
        path = (0, *verdict.accepted_nodes)
        self.pool.commit(job.session, [base + node for node in path], [int(tree.tokens[node]) for node in path])
        self.pool.count(len(job.call.context.tokens), job.num_computed)
        self._gathering.answered(job.session.session_id, time.perf_counter(), job.call.caller)
        self._price.answered(len(path), expected_tokens(job))
        self._calls.answer(job, job.result(verdict, share))
