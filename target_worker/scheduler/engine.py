"""The sweep thread: packs the trees of all waiting calls into one batch, sweeps, and answers.

All slots and the model belong to this thread; services send it commands through a queue and get futures.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from bough.concurrency.futures import Inbox, PendingCalls, settle
from bough.concurrency.stall_timer import StallTimer
from bough.errors import AcceleratorFull, BoughError, PrefixMissing, RingLost, StaleEpoch, Unavailable
from bough.model.sizes.target_limits import TargetLimits
from bough.protocol.cost_curve import CostCurve
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Timings, Verdict, VerifyCall, VerifyResult
from bough.protocol.prefix_hash import prefix_hash
from bough.sizing.row_counts import OWN_MOST
from bough.sizing.sweep_times import SweepTimes
from target_worker.kv.slot_pool import SlotPool
from target_worker.scheduler.batch_delay import BatchDelay
from target_worker.scheduler.batching import Part
from target_worker.scheduler.job import Sweeper, SweepInFlight, SweepShare, Swept, VerifyJob
from target_worker.scheduler.prefix_sharing import choose_shared
from target_worker.scheduler.request_queue import CallQueue
from target_worker.scheduler.row_division import SweepYield, expected_tokens, make_fit, share_rows

logger = logging.getLogger(__name__)

NANO = 1e-9
# Time without progress after which a sweep has stalled: no layer takes as long on a useful machine.
STILL_SECONDS = 120.0
WORTH_DIVIDING = 0.9  # share of their tokens that several sweeps at a time must bring more than one, to divide calls
SHUT_DOWN = "the target worker is being shut down"


class SharedSweeps:
    """Waiting calls, what goes into the next sweep, and what comes of it; times are seconds on any one clock."""

    def __init__(
        self,
        pool: SlotPool,
        limits: TargetLimits,
        times: SweepTimes,
        chunk: int,
        max_delay: float,
        most_in_flight: int = 1,
    ) -> None:
        """`chunk` rows are computed together; `max_delay` is as in `BatchDelay`.

        Up to `most_in_flight` sweeps run at the same time, in different stages of the target.
        """
        self.pool, self.times, self.cost = pool, times, times.curve()  # of one sweep in flight
        self.delay = BatchDelay(max_delay)
        self.calls = CallQueue(pool, limits, self.delay.left)
        self.most_tokens = limits.max_sweep_tokens  # limit of a sweep; lowered when memory ran out
        self._limits, self._most_rows, self._most_in_flight = limits, limits.max_sweep_tokens, most_in_flight
        self._beside: dict[int, SweepTimes] = {}  # by number in flight, above one
        self._chunk, self._least_shared = chunk, chunk if pool.shares_anywhere else limits.max_context
        self._yield = SweepYield()

    def times_of(self, num_in_flight: int) -> SweepTimes:
        """What is known of sweeps while so many were in flight: at first what is known of one."""
        return self._beside.get(num_in_flight, self.times)

    def wait_seconds(self, now: float) -> float | None:
        """How long the next sweep waits for calls that are expected; None if there is nothing to sweep."""
        return self.delay.seconds(now, self.calls.by_caller()) if self.calls.ready() else None

    def choose(self, num_in_flight: int = 0) -> list[Part[VerifyJob]]:
        """The parts of the next sweep, which begins while others are in flight.

        If more may follow it at once, calls are divided among them where that brings more tokens.
        """
        self.calls.copy_prefix()
        jobs, most = self.calls.ready(), self._most_in_flight
        parts, is_divided = self._choose(jobs, num_in_flight + 1), False
        if len(parts) > 1 and (num_left := most - num_in_flight) > 1:
            share = self._choose([part.job for part in parts[: -(-len(parts) // num_left)]], most)
            is_divided = num_left * self._rate(share, most) * WORTH_DIVIDING > self._rate(parts, num_in_flight + 1)
            parts = share if is_divided else self._choose(jobs, num_in_flight + 1)  # trees were cut for the share
        if not is_divided:  # what was divided has waited together
            self.delay.begins()
        for job in jobs:
            job.num_sweeps_skipped += 1
        return parts

    def _rate(self, parts: Sequence[Part[VerifyJob]], num_in_flight: int) -> float:
        """Tokens of a second in which a sweep of these parts runs: expected ones of trees, and shares of contexts."""
        cost = self.times_of(num_in_flight).curve()
        tokens = 0.0
        for job, num_context, has_tree in parts:
            tokens += (expected_tokens(job) or 1.0) * (1.0 if has_tree else num_context / job.num_remaining)
        return tokens / cost(sum(part.num_tokens for part in parts)) if cost is not None else 0.0

    def _choose(self, jobs: Sequence[VerifyJob], num_in_flight: int) -> list[Part[VerifyJob]]:
        times, recent, limits = self.times_of(num_in_flight), self._yield.recent, self._limits
        most = min(self.most_tokens, limits.sweep_tokens(times.free_rows))
        most_nodes = min(most, limits.max_logit_rows)
        # A second of a sweep costs what the target yields in a second, by all sweeps in flight together.
        recent = recent._replace(tokens_per_second=recent.tokens_per_second / num_in_flight)
        knee = max(times.knee, self._chunk)  # `chunk` rows are computed together, so it cannot be lower
        cost = times.curve()
        make_fit(jobs, cost, recent, most_nodes)
        in_flight = [job for job in self.calls if job.num_in_sweep]
        seconds = cost or (lambda _: 0.0)
        parts = choose_shared(jobs, most, knee, self._least_shared, seconds, in_flight, most_nodes)
        share_rows(parts, cost, recent, most)
        return parts

    def observe_times(
        self,
        num_rows: int,
        seconds: float,
        waited: float,
        link_bytes: int,
        expert_ratio: float = 0.0,
        num_in_flight: int = 1,
    ) -> None:
        """Learn from a sweep, of which so many seconds were waited for the link."""
        if num_in_flight > 1 and self.cost is not None and num_in_flight not in self._beside:
            times = SweepTimes(self.cost.step, self._most_rows, self.cost, mixture=self.times.mixture)
            self._beside[num_in_flight] = times
        self.times_of(num_in_flight).observe(num_rows, seconds, waited, link_bytes, expert_ratio)
        self.cost = self.times.curve()
        self.delay.swept(seconds)

    def commit(self, part: Part[VerifyJob], timings: Timings, began_ns: int, share: SweepShare) -> None:
        """Commit what a sweep has computed of a call's text."""
        job, num_context, _ = part
        begin = job.num_cached
        rows = range(begin, begin + num_context)
        self.pool.commit(job.session, rows, job.text.tokens[begin : begin + num_context])
        job.swept(num_context, timings, began_ns, share)

    def answer(
        self, job: VerifyJob, verdict: Verdict, share: SweepShare, arrived: float, clock: Callable[[], float]
    ) -> None:
        """Commit the accepted path, and answer a call whose tree was in a sweep; it arrived at `arrived` of `clock`."""
        tree, base = job.tree, len(job.text.tokens)
        path = (0, *verdict.accepted_nodes)
        self.pool.commit(job.session, [base + node for node in path], [int(tree.tokens[node]) for node in path])
        self.pool.count(len(job.call.context.tokens), job.num_computed)
        now = clock()  # moving the path's rows takes milliseconds
        self.delay.answered(job.session.session_id, now, job.call.caller)
        self._yield.answered(len(path), expected_tokens(job))
        self.calls.answer(job, job.result(verdict, share, round((now - arrived) / NANO)))

    def ended(self, seconds: float, now: float, num_in_flight: int = 1) -> None:
        """Note that all calls of a sweep are answered."""
        self._yield.swept(seconds / num_in_flight, now)


@dataclass(slots=True, eq=False)
class Sweep:
    """A sweep in flight."""

    parts: Sequence[Part[VerifyJob]]
    began_ns: int
    began: tuple[float, float] = (0.0, 0.0)  # time, and seconds of all sweeps until then

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)


class SweepsInFlight:
    """Counts how many sweeps are in flight; times are seconds on `clock`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._now, self._seconds = clock, clock(), 0.0
        self._sweeps: list[Sweep] = []

    def __len__(self) -> int:
        return len(self._sweeps)

    def begin(self, sweep: Sweep) -> None:
        self._count()
        sweep.began = self._now, self._seconds
        self._sweeps.append(sweep)

    def mean_number(self, sweep: Sweep) -> int:
        """How many were in flight since a sweep began, itself included: rounded, the mean over time."""
        self._count()
        began, seconds = sweep.began
        return round((self._seconds - seconds) / (self._now - began)) if self._now > began else 1

    def end(self, sweep: Sweep) -> None:
        self._count()
        self._sweeps.remove(sweep)

    def _count(self) -> None:
        now = self._clock()
        self._seconds += len(self._sweeps) * (now - self._now)
        self._now = now


class SweepEngine:
    """Verifies trees of many sessions, one sweep at a time, or at several stages one after another."""

    def __init__(
        self,
        sweeper: Sweeper,
        pool: SlotPool,
        limits: TargetLimits,
        max_waiting: int,
        max_delay: float = 0.0,
        observe: Callable[[int, int, Swept], None] = lambda *_: None,
        progress: Callable[[], int] | None = None,
        lost_kv: Callable[[], bool] = lambda: False,
        most_in_flight: int = 1,
    ) -> None:
        """Accept at most `max_waiting` unanswered calls; others are as in `SharedSweeps`.

        `observe` is called after every sweep, on the sweep thread, with its calls, tokens and result. `progress` is a
        counter that grows while a sweep proceeds, for detecting stalls; without it stalls are not detected. `lost_kv`
        is called before every sweep: whether keys and values outside this process were lost since its last call. It
        raises Unavailable while a part of the target is missing.
        """
        self.pool = pool
        self.num_running = 0  # calls with a part in a sweep in flight
        self.num_passes = 0  # sweeps that have ended, failed ones included
        self._observe = observe
        self._sweeper = sweeper
        self._limits = limits
        self._unanswered = PendingCalls(max_waiting)
        times = SweepTimes(sweeper.rows.step, limits.max_sweep_tokens)
        together = max(sweeper.rows.step, min(sweeper.rows.most, OWN_MOST))
        self._sweeps = SharedSweeps(pool, limits, times, together, max_delay, most_in_flight)
        self._calls, self._delay = self._sweeps.calls, self._sweeps.delay
        self._in_flight, self._most_in_flight = SweepsInFlight(time.perf_counter), most_in_flight
        self._all_gain = False  # all waiting calls gain by waiting for a sweep in flight
        self._stall, self._progress, self._lost_kv = StallTimer(), progress, lost_kv
        self._inbox = Inbox(SHUT_DOWN)
        self._idle_since = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)

    def start(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Start the thread, which first calls `prepare`."""
        self._inbox.put(prepare)
        self._thread.start()

    def warm_up(self) -> Future[None]:
        """Run a first sweep without calls; the future raises its error."""
        future: Future[None] = Future()

        def run() -> None:
            limits = self._limits
            with self.pool.scratch(min(self._sweeper.rows.most, limits.slot_rows, limits.max_logit_rows)) as slot:
                times = self._sweeper.warm_up(slot, self._limits.max_sweep_tokens)
            if times is not None:
                self._sweeps.times, self._sweeps.cost = times, times.curve()
            settle(future, None)

        self._inbox.post(future, run)
        return future

    def stop(self) -> None:
        """End the thread once it does not compute; calls without an answer, and later ones, raise Unavailable."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def cost(self) -> CostCurve | None:
        """Seconds of a sweep by rows; any thread."""
        return self._sweeps.cost

    @property
    def num_waiting(self) -> int:
        """Unanswered calls without a part in a sweep in flight."""
        return max(0, len(self._unanswered) - self.num_running)

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last sweep; 0 during one. Any thread."""
        return 0.0 if self.num_running else time.monotonic() - self._idle_since

    def trouble(self) -> str:
        """Why a sweep does not proceed; empty if it does. Only one thread may call this."""
        if self._progress is None:
            return ""
        seconds = self._stall.seconds(self.num_running > 0, self._progress(), time.monotonic())
        if seconds < STILL_SECONDS:
            return ""
        return f"a sweep has made no progress for {seconds:.0f} seconds: a disk or a device hangs"

    def verify(self, call: VerifyCall) -> Future[VerifyResult]:
        """Queue a call; any thread. The future raises errors of `bough.errors`.

        A cancelled call is dropped before the next sweep, if nobody else waits for its answer.
        """
        future: Future[VerifyResult] = Future()
        arrived_ns = time.perf_counter_ns()
        try:
            self._unanswered.add(future)
        except BoughError as exc:
            settle(future, exc)
            return future
        self._inbox.post(future, lambda: self._admit(call, future, arrived_ns))
        return future

    def release(self, session_id: ScopedId, epoch: int = 0) -> Future[None]:
        """Release a session once the thread does not compute; a sweep in flight has no effect on it any more.

        With an `epoch`, the future raises StaleEpoch if the session has a newer one.
        """
        future: Future[None] = Future()

        def run() -> None:
            session = self.pool.get(session_id)
            if epoch and session is not None:
                session.require_epoch(epoch)
            self._calls.drop(session_id, StaleEpoch(f"session_id: {session_id.name!r} was released"))
            self._delay.left(session_id)
            self.pool.release(session_id)
            settle(future, None)

        self._inbox.post(future, run)
        return future

    def drain(self) -> Future[None]:
        """Refuse new sessions from now on; done when all calls are answered."""
        self._calls.is_draining = True
        return self._unanswered.when_idle()

    # Everything below runs on the sweep thread.

    def _run(self) -> None:
        while self._run_commands():
            if parts := self._prepare():
                self._sweep(parts)
            self._all_gain = bool(self._in_flight) and not parts
        self._calls.drop_all(Unavailable(SHUT_DOWN))
        self._inbox.end()

    def _run_commands(self) -> bool:
        """Run queued commands, and wait for one while there is nothing to sweep; False after the stop command."""
        self._calls.drop_unwanted()  # first, as new calls may need their slots
        return self._inbox.run(self._wait_seconds)

    def _wait_seconds(self) -> float | None:
        is_full = len(self._in_flight) == self._most_in_flight
        return None if is_full or self._all_gain else self._sweeps.wait_seconds(time.perf_counter())

    def _admit(self, call: VerifyCall, future: Future[VerifyResult], arrived_ns: int) -> None:
        if future.cancelled():
            return
        self._all_gain = False
        self._calls.admit(call, future, arrived_ns)  # a refused call says nothing about its session
        self._delay.arrived(call.context.session_id, arrived_ns * NANO, call.caller, call.num_running)

    def _prepare(self) -> list[Part[VerifyJob]]:
        """Choose the parts of the next sweep."""
        try:
            self._calls.drop_unwanted()
            if self._lost_kv():
                self._forget_all()
            return self._sweeps.choose(len(self._in_flight))
        except Unavailable as exc:
            self._calls.drop_all(exc)
            return []
        except Exception as exc:  # the thread must survive any error
            logger.exception("a sweep could not be prepared")
            self._calls.drop_all(exc)
            return []

    def _forget_all(self) -> None:
        """Drop all that slots hold; callers send their tokens again."""
        lost = "context.context_start: must be 0, as a stage has lost what it held; send the session's tokens again"
        self._calls.drop_all(PrefixMissing(lost, held_hash=prefix_hash(())))
        self.pool.forget_all()

    def _sweep(self, parts: Sequence[Part[VerifyJob]]) -> None:
        sweep = Sweep(parts, time.perf_counter_ns())
        self._in_flight.begin(sweep)
        for part in parts:
            part.job.session.slot.num_in_sweep = part.num_tokens
        self.num_running += len(parts)
        self._go_on(sweep, lambda: self._sweeper.sweep(parts))

    def _go_on(self, sweep: Sweep, step: Callable[[], Swept | SweepInFlight]) -> None:
        """Take a step of a sweep, and the next one when its rows are back."""
        try:
            reached = step()
            if not isinstance(reached, Swept):
                finish = partial(self._go_on, sweep, reached.finish)
                reached.arrived.add_done_callback(lambda _: self._inbox.post(Future(), finish))
                return
            self._finish(sweep, reached)
        except Exception as exc:  # the thread must survive any error; callers get it
            self._failed(sweep, exc)
        self._in_flight.end(sweep)
        self._all_gain = False
        self._idle_since = time.monotonic()
        self.num_running -= len(sweep.parts)
        self.num_passes += 1

    def _failed(self, sweep: Sweep, exc: Exception) -> None:
        parts = [part for part in sweep.parts if part.job in self._calls]
        for part in parts:
            self._mend(part.job)
        if isinstance(exc, AcceleratorFull) and self._shrink(sweep.num_tokens, exc):
            return
        if isinstance(exc, RingLost):
            logger.warning("a sweep failed: %s", exc)
        else:
            logger.error("a sweep failed", exc_info=exc)
        for part in parts:
            self._calls.drop(part.job.call.context.session_id, exc)

    def _mend(self, job: VerifyJob) -> None:
        """Drop partial results of a sweep that failed midway; they are computed again."""
        before = job.session.slot.length
        try:
            self.pool.drop_partial(job.session)
        except Exception as exc:  # as above; the session's states are marked, and dropped when it calls again
            logger.exception("a session could not be rolled back after a failed sweep")
            self._calls.drop(job.call.context.session_id, exc)
        job.num_computed = max(0, job.num_computed - (before - job.session.slot.length))

    def _shrink(self, num_tokens: int, exc: AcceleratorFull) -> bool:
        """Halve the size limit of sweeps after one ran out of memory; False if it cannot be lower."""
        least = max(self._limits.max_nodes, self._sweeper.rows.step)
        if num_tokens <= least:
            return False
        most = self._sweeps.most_tokens = max(least, min(self._sweeps.most_tokens, num_tokens // 2))
        logger.warning("%s; sweeps have at most %d tokens from now on, not %d", exc, most, num_tokens)
        return True

    def _finish(self, sweep: Sweep, swept: Swept) -> None:
        times, number = swept.timings, self._in_flight.mean_number(sweep)
        seconds, waited = times.total_ns * NANO, times.wait_ns * NANO
        expected, counted = self._sweeps.times.expert_ratio(sweep.num_tokens), times.expert_ratio
        self._sweeps.observe_times(sweep.num_tokens, seconds, waited, times.link_bytes, counted, number)
        self._observe(len(sweep.parts), sweep.num_tokens, swept)
        share = SweepShare.of(sweep.parts, self._sweeps.times_of(number).curve(), swept.spans)
        share = share._replace(expert_ratio=expected)
        for part in sweep.parts:
            if (job := part.job) not in self._calls:  # it was dropped while the sweep was in flight
                continue
            self._sweeps.commit(part, times, sweep.began_ns, share)
            if part.has_tree:
                try:
                    verdict = job.verdict(swept.verdict_on)
                    self._sweeps.answer(job, verdict, share, job.arrived_ns * NANO, time.perf_counter)
                except Exception as exc:  # of one call: the others are answered
                    if not isinstance(exc, BoughError):
                        job.context.run(logger.exception, "a verdict failed")
                    self._calls.drop(job.call.context.session_id, exc)
        self._sweeps.ended(seconds, time.perf_counter(), number)
        self.pool.check_now_and_then()
