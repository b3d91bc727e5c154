"""The calls that wait for sweeps, at most one per session: admits calls, and ends them without an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from bough.concurrency.futures import settle
from bough.errors import InvalidRequest, Preempted, PrefixMissing, StaleEpoch, Unavailable
from bough.model.sizes.target_limits import TargetLimits
from bough.protocol.ids import ScopedId
from bough.protocol.messages import VerifyCall, VerifyResult
from bough.protocol.prefix_hash import prefix_hash
from bough.sizing.row_counts import OWN_MOST
from target_worker.kv.slot_index import SessionSlot, Text
from target_worker.kv.slot_pool import SlotPool
from target_worker.scheduler.job import VerifyJob


class CallQueue:
    """Waiting calls; only the sweep thread uses it."""

    def __init__(self, pool: SlotPool, limits: TargetLimits, left: Callable[[ScopedId], None] = lambda _: None) -> None:
        """`left` is called with the id of each preempted session."""
        self.pool = pool
        self.is_draining = False
        self._limits, self._left = limits, left
        self._jobs: dict[ScopedId, VerifyJob] = {}  # by session, in order of arrival

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[VerifyJob]:
        """Iterate in order of arrival."""
        return iter(self._jobs.values())

    def __contains__(self, job: VerifyJob) -> bool:
        """Whether a job has neither been answered nor dropped."""
        return self._jobs.get(job.call.context.session_id) is job

    def by_caller(self) -> Counter[str]:
        return Counter(job.call.caller for job in self)

    def ready(self) -> list[VerifyJob]:
        """The jobs that the next sweep may have parts of, in order of arrival."""
        return [job for job in self if not job.num_in_sweep]

    def admit(self, call: VerifyCall, future: Future[VerifyResult], arrived_ns: int) -> None:
        """Admit a call, or answer it at once if its answer is known.

        Raises:
            InvalidRequest: it exceeds the limits of a session.
            PrefixMissing: the session holds less than the caller assumes, or something else.
            StaleEpoch: the session has a newer epoch or round, or another round of it is in flight.
            Preempted: the session was preempted, and there is no room for it yet.
            Exhausted: there is no room.
            Unavailable: the worker is draining, and the session is new.
        """
        context = call.context
        self._require_fit(call)
        running = self._jobs.get(context.session_id)
        if running is not None and self._joined(running, call, future):
            return
        session = self.pool.get(context.session_id)
        if session is None:
            self._require_new(call)
        else:
            session.require_epoch(call.epoch)
            if session.last_result is not None and (call.epoch, call.round) == (session.epoch, session.last_round):
                settle(future, session.last_result)
                return
            session.require_round(call.epoch, call.round)
            if self._asks_first(call) and context.context_start > session.slot.length:
                self._reserve(call, session.slot.tokens)
            session.slot.require(context.context_start, context.prefix_hash)
        held = session.slot.tokens[: context.context_start] if session is not None else []
        text = Text([*held, *context.tokens], context.cache_salt)
        session = self._lease(call, text)
        self._jobs[context.session_id] = VerifyJob(call, session, text, [future], arrived_ns)

    def copy_prefix(self) -> None:
        """Copy what other slots hold of the tokens that calls still lack."""
        for job in self.ready():
            if job.num_remaining:
                self.pool.copy_prefix(job.session, job.text)

    def drop(self, session_id: ScopedId, error: Exception) -> None:
        """End a session's call, if there is one, with an error."""
        job = self._jobs.pop(session_id, None)
        if job is not None:
            self.pool.end_call(job.session)
            job.settle(error)

    def drop_unwanted(self) -> None:
        """End calls that nobody waits for any more; their sessions become idle."""
        for session_id, job in [*self._jobs.items()]:
            if not job.is_wanted:
                del self._jobs[session_id]
                self.pool.end_lease(job.session)

    def answer(self, job: VerifyJob, result: VerifyResult) -> None:
        """Answer a call, and keep the answer for a caller who asks again."""
        session = job.session
        session.last_round, session.last_result = job.call.round, result
        del self._jobs[session.session_id]
        self.pool.end_call(session)
        job.settle(result)

    def drop_all(self, error: Exception) -> None:
        for session_id in [*self._jobs]:
            self.drop(session_id, error)

    def _joined(self, running: VerifyJob, call: VerifyCall, future: Future[VerifyResult]) -> bool:
        """Whether a call waits for the answer of the call in flight; a newer epoch ends that call instead."""
        if (call.epoch, call.round) == (running.call.epoch, running.call.round):
            running.futures.append(future)
            return True
        if call.epoch <= running.call.epoch:
            raise StaleEpoch(
                f"round: must be {running.call.round} of epoch {running.call.epoch}, which is in flight, "
                f"got {call.round} of epoch {call.epoch}",
                running.call.epoch,
            )
        self.drop(call.context.session_id, StaleEpoch(f"epoch: {call.epoch} of this session has begun"))
        return False

    def _require_fit(self, call: VerifyCall) -> None:
        length, longest = call.context.base_length + 1, self._limits.max_context
        if length > longest:
            raise InvalidRequest("context", f"must have at most {longest} tokens", length)
        if (deepest := call.context.base_length + int(call.tree.depths().max())) >= longest:
            # Beyond its maximum context a model may compute wrong positions for a whole batch, other sessions included.
            raise InvalidRequest("tree", f"positions must be from 0 to {longest - 1}", deepest)

    def _require_new(self, call: VerifyCall) -> None:
        """Check that a session may begin with this call, before it takes a slot."""
        if self.is_draining:
            raise Unavailable("this target worker is draining: new sessions must go to another one")
        if start := call.context.context_start:
            if self._asks_first(call):
                self._reserve(call, [])
            raise PrefixMissing(
                f"context.context_start: must be 0 for a session that is not known here, got {start}; send "
                "its tokens from the beginning",
                held_hash=prefix_hash(()),
            )

    def _reserve(self, call: VerifyCall, held: Sequence[int]) -> None:
        """Reserve a slot for a call before asking it for its tokens. Raises Exhausted.

        Nobody can take the room meanwhile, and without room nothing is sent.
        """
        self.pool.end_call(self._lease(call, Text([*held], call.context.cache_salt)))

    def _asks_first(self, call: VerifyCall) -> bool:
        """Whether a call that lacks tokens gets its slot before it is asked for them."""
        return call.reserves or self.pool.is_waiting(call.context.session_id)

    def _lease(self, call: VerifyCall, text: Text) -> SessionSlot:
        """Lease a slot with room for the call, preempting younger sessions if the slot must grow."""
        name, (num_rows, most_rows) = call.context.session_id, self._rows(call)
        for session in self.pool.to_preempt(name, call.epoch, num_rows):
            self._preempt(session)
        return self.pool.lease(name, call.epoch, num_rows, text, most_rows)

    def _preempt(self, session: SessionSlot) -> None:
        self._left(session.session_id)
        self.drop(session.session_id, Preempted("KV memory is full: this session gave way to an older one"))
        self.pool.preempt(session)

    def _rows(self, call: VerifyCall) -> tuple[int, int]:
        """Rows of a slot: for the text rounded up to a step, and for the request's longest text; each plus a tree."""
        limits, now = self._limits, call.context.base_length + 1
        step = min(limits.rows, OWN_MOST)  # a GPU's products have more rows than most trees
        tree_rows = min(limits.max_nodes, _up_to_whole(step, len(call.tree)))  # rarely outgrown
        longest = min(limits.max_context, max(call.max_length or limits.max_context, now))
        return min(longest, _up_to_whole(limits.kv_step, now)) + tree_rows, longest + tree_rows


def _up_to_whole(step: int, number: int) -> int:
    return -(-number // step) * step
