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
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from bough.errors import BoughError, InvalidRequest, PrefixMissing, StaleEpoch
from bough.messages import Timings, Verdict, VerifyCall, VerifyResult
from bough.model.batch import Batch, Segment
from bough.model.draw import Row, adjusted, draw, draw_by, position_logprobs
from bough.prefix import prefix_hash
from target_worker.slots import HeldSession, SlotPool
from target_worker.sweep import SweepFigures
from target_worker.verify import draws_at, law_given, walk

logger = logging.getLogger(__name__)


class SweepModel(Protocol):
    """The seam below the engine: a streamed model, or a fake."""

    rows: int
    device: torch.device

    def sweep(self, batch: Batch) -> tuple[torch.Tensor, SweepFigures]:
        """(num_logit_rows, vocab_size) logits, and where the time went."""
        ...


@dataclass(slots=True, eq=False)
class Job:
    """A call on its way through one or more sweeps."""

    call: VerifyCall
    session: HeldSession
    futures: list[Future[VerifyResult]]
    arrived_ns: int
    num_prefilled: int = 0  # context tokens whose KV is there
    timings: Timings = field(default_factory=Timings)

    @property
    def num_left(self) -> int:
        """Context tokens still to be prefilled."""
        return len(self.call.context.tokens) - self.num_prefilled


class Part(NamedTuple):
    """What of a job goes into one sweep."""

    job: Job
    num_context: int
    has_tree: bool


class Engine:
    """Verifies trees of many sessions, one sweep at a time."""

    def __init__(
        self,
        model: SweepModel,
        pool: SlotPool,
        max_sweep_tokens: int,
        max_context: int,
        observe: Callable[[int, SweepFigures], None] = lambda *_: None,
    ) -> None:
        """`observe` hears of every sweep, on the sweep thread: its tokens, and where its time went."""
        self.pool = pool
        self._observe = observe
        self._model = model
        self._max_sweep_tokens = max_sweep_tokens
        self._max_context = max_context
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[str, Job] = {}  # by session, in order of arrival
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)

    def start(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Starts the thread; `prepare` is called on it before anything else."""
        self._inbox.put(prepare)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the sweep that is under way; calls that still wait are not answered."""
        self._inbox.put(None)
        self._thread.join()

    def verify(self, call: VerifyCall) -> Future[VerifyResult]:
        """Queues a call; any thread may call this. The future raises what `bough.errors` names."""
        future: Future[VerifyResult] = _uncancellable()
        arrived_ns = time.perf_counter_ns()
        self._inbox.put(lambda: self._settle_errors(future, lambda: self._admit(call, future, arrived_ns)))
        return future

    def release(self, session_id: str) -> Future[None]:
        """Forgets a session, after the sweep that is under way."""
        future: Future[None] = _uncancellable()

        def run() -> None:
            self._drop(session_id, StaleEpoch(f"session_id: {session_id!r} was released"))
            self.pool.release(session_id)
            future.set_result(None)

        self._inbox.put(lambda: self._settle_errors(future, run))
        return future

    # Below here everything runs on the sweep thread.

    def _run(self) -> None:
        while self._take_mail():
            parts = self._choose()
            began_ns = time.perf_counter_ns()
            try:
                batch = Batch(self._segments(parts), self._model.rows, self._model.device)
                logits, figures = self._model.sweep(batch)
                self._observe(batch.num_tokens, figures)
                self._finish(parts, logits, figures, began_ns)
            except Exception as exc:  # the thread outlives whatever a sweep can do; its callers are told
                logger.exception("a sweep failed")
                for part in parts:
                    self._drop(part.job.call.context.session_id, exc)

    def _take_mail(self) -> bool:
        """Acts on all mail, waiting for some while there is nothing to sweep; False once told to stop."""
        while not self._jobs or not self._inbox.empty():
            mail = self._inbox.get()
            if mail is None:
                return False
            mail()
        return True

    @staticmethod
    def _settle_errors(future: Future[VerifyResult] | Future[None], act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as exc:  # handed to whoever waits on the future
            future.set_exception(exc)

    def _admit(self, call: VerifyCall, future: Future[VerifyResult], arrived_ns: int) -> None:
        context = call.context
        if context.base_length + 1 > self._max_context:
            raise InvalidRequest(
                f"context: {context.base_length + 1} tokens; at most {self._max_context} fit a session"
            )
        running = self._jobs.get(context.session_id)
        if running is not None and self._joined(running, call, future):
            return
        if context.context_start and self.pool.get(context.session_id) is None:
            raise PrefixMissing(
                f"context.context_start: {context.context_start} tokens were taken to be held, but the session is not "
                "known here; send its tokens from the beginning",
                held_hash=prefix_hash(()),
            )
        session = self.pool.lease(context.session_id, call.epoch)
        if session.last_result is not None and call.round == session.last_round:
            future.set_result(session.last_result)
            return
        session.slot.stand_on(context.context_start, context.prefix_hash)
        session.is_busy = True
        self._jobs[context.session_id] = Job(call, session, [future], arrived_ns)

    def _joined(self, running: Job, call: VerifyCall, future: Future[VerifyResult]) -> bool:
        """Whether a call waits for the answer of the one in flight; a newer epoch puts an end to that one instead."""
        if (call.epoch, call.round) == (running.call.epoch, running.call.round):
            running.futures.append(future)
            return True
        if call.epoch <= running.call.epoch:
            raise StaleEpoch(
                f"round: {call.round} of epoch {call.epoch}, but round {running.call.round} of epoch "
                f"{running.call.epoch} of this session is in flight"
            )
        self._drop(call.context.session_id, StaleEpoch(f"epoch: {call.epoch} of this session has begun"))
        return False

    def _drop(self, session_id: str, error: Exception) -> None:
        job = self._jobs.pop(session_id, None)
        if job is not None:
            job.session.is_busy = False
            for future in job.futures:
                future.set_exception(error)

    def _choose(self) -> list[Part]:
        """As much of each job as fits the sweep, first come first served; a tree goes whole or waits."""
        room, parts = self._max_sweep_tokens, []
        for job in self._jobs.values():
            num_context = min(job.num_left, room)
            room -= num_context
            has_tree = num_context == job.num_left and len(job.call.tree) <= room
            room -= len(job.call.tree) if has_tree else 0
            if num_context or has_tree:
                parts.append(Part(job, num_context, has_tree))
        return parts

    @staticmethod
    def _segments(parts: Sequence[Part]) -> list[Segment]:
        segments = []
        for job, num_context, has_tree in parts:
            context, slot = job.call.context, job.session.slot
            tokens = context.tokens[job.num_prefilled : job.num_prefilled + num_context]
            segments.append(Segment.context(slot, context.context_start + job.num_prefilled, tokens))
            if has_tree:
                segments.append(Segment.tree(slot, context.base_length, job.call.tree))
        return segments

    def _finish(self, parts: Sequence[Part], logits: torch.Tensor, figures: SweepFigures, began_ns: int) -> None:
        first_row = 0
        for job, num_context, has_tree in parts:
            context, slot = job.call.context, job.session.slot
            begin = job.num_prefilled
            slot.compact(range(slot.length, slot.length + num_context), context.tokens[begin : begin + num_context])
            job.num_prefilled += num_context
            job.timings = _add_sweep(job, figures, began_ns)
            if has_tree:
                rows = logits[first_row : first_row + len(job.call.tree)]
                first_row += len(job.call.tree)
                try:
                    self._answer(job, rows)
                except BoughError as exc:
                    self._drop(context.session_id, exc)
        self.pool.check_integrity()

    def _answer(self, job: Job, logits: torch.Tensor) -> None:
        call, session = job.call, job.session
        verdict = judge(call, [*session.slot.tokens], lambda path: logits[path[-1]].double().numpy())
        path = (0, *verdict.accepted_nodes)
        base = call.context.base_length
        session.slot.compact([base + node for node in path], [int(call.tree.tokens[node]) for node in path])
        timings = replace(job.timings, total_ns=time.perf_counter_ns() - job.arrived_ns)
        result = VerifyResult(verdict, session.slot.length, timings, call.context.context_start)
        session.last_round, session.last_result = call.round, result
        session.is_busy = False
        del self._jobs[call.context.session_id]
        for future in job.futures:
            future.set_result(result)


def judge(call: VerifyCall, held: Sequence[int], logits_after: Callable[[Sequence[int]], Row]) -> Verdict:
    """The verdict on a tree; `held` are the tokens before the root.

    `logits_after` gives the target's raw logits (vocab_size,) after a path of nodes; few are ever asked for.
    """
    tree, params, base = call.tree, call.sampling, call.context.base_length
    logprobs = []

    def next_token(path: Sequence[int]) -> int:
        raw = logits_after(path)
        history = [*held, *(int(tree.tokens[node]) for node in path)] if params.has_penalties else ()
        row, position = adjusted(raw, params, history, call.context.prompt_length), base + len(path)
        draws = [*draws_at(tree, path[-1], call.scheme, len(row))]
        if draws:
            token = draw_by(lambda target_probs: law_given(target_probs, draws), row, params, position)
        else:
            token = draw(row, params, position)
        if params.logprobs is not None:
            logprobs.append(position_logprobs(raw, token, params.logprobs))
        return token

    return walk(tree, next_token)._replace(logprobs=tuple(logprobs))


def _uncancellable() -> Future[Any]:
    """A future whose caller may leave without the sweep thread stumbling over it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _add_sweep(job: Job, figures: SweepFigures, began_ns: int) -> Timings:
    before = job.timings
    is_first = before.num_passes == 0
    return replace(
        before,
        queue_ns=began_ns - job.arrived_ns if is_first else before.queue_ns,
        wait_ns=before.wait_ns + figures.wait_ns,
        compute_ns=before.compute_ns + figures.total_ns - figures.wait_ns,
        link_ns=before.link_ns + figures.link_ns,
        link_bytes=before.link_bytes + figures.link_bytes,
        link_ideal_ns=before.link_ideal_ns + figures.link_ideal_ns,
        num_passes=before.num_passes + 1,
    )
