"""The calls that wait for sweeps, at most one of each session: how they come in, and how they end without an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from bough.concurrency.futures import settle
from bough.errors import InvalidRequest, Preempted, PrefixMissing, StaleEpoch, Unavailable
from bough.model.sizes.target_limits import TargetLimits
from bough.protocol.messages import VerifyCall, VerifyResult
from bough.protocol.prefix_hash import prefix_hash
from target_worker.kv.session_slot import SessionSlot, Text
from target_worker.kv.slot_pool import SlotPool
from target_worker.scheduler.job import VerifyJob


class CallQueue:
    """Owned by the sweep thread."""

    def __init__(self, pool: SlotPool, limits: TargetLimits, left: Callable[[str], None] = lambda _: None) -> None:
        """`left` is told of sessions that give way to others, and will not be back soon."""
        self.pool = pool
        self.is_draining = False
        self._limits, self._left = limits, left
        self._jobs: dict[str, VerifyJob] = {}  # by session, in order of arrival

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[VerifyJob]:
        """In order of arrival."""
        return iter(self._jobs.values())

    def by_caller(self) -> Counter[str]:
        """How many there are of each caller."""
        return Counter(job.call.caller for job in self)

    def admit(self, call: VerifyCall, future: Future[VerifyResult], arrived_ns: int) -> None:
        """Takes a call in, or answers it at once where its answer is known.

        Raises:
            InvalidRequest: it does not fit a session.
            PrefixMissing: the session holds less than the caller believes, or something else.
            StaleEpoch: the session has been placed anew, is further, or another round of it is in flight.
            Preempted: the session gave way, and there is no room for it yet.
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

    def borrow(self) -> None:
        """Copies what others hold by now of what calls still lack."""
        for job in self:
            if job.num_left:
                self.pool.borrow(job.session, job.text)

    def drop(self, session_id: str, error: Exception) -> None:
        """Ends a session's call, if there is one, with an error."""
        job = self._jobs.pop(session_id, None)
        if job is not None:
            self.pool.rest(job.session)
            job.settle(error)

    def drop_unwanted(self) -> None:
        """Ends calls that nobody waits for any more; their sessions become idle."""
        for session_id, job in [*self._jobs.items()]:
            if not job.is_wanted:
                del self._jobs[session_id]
                self.pool.abandon(job.session)

    def answer(self, job: VerifyJob, result: VerifyResult) -> None:
        """A call has its answer, which is kept for a caller who asks again."""
        session = job.session
        session.last_round, session.last_result = job.call.round, result
        del self._jobs[session.session_id]
        self.pool.rest(session)
        job.settle(result)

    def drop_all(self, error: Exception) -> None:
        """Ends all calls with an error."""
        for session_id in [*self._jobs]:
            self.drop(session_id, error)

    def _joined(self, running: VerifyJob, call: VerifyCall, future: Future[VerifyResult]) -> bool:
        """Whether a call waits for the answer of the one in flight; a newer epoch puts an end to that one instead."""
        if (call.epoch, call.round) == (running.call.epoch, running.call.round):
            running.futures.append(future)
            return True
        if call.epoch <= running.call.epoch:
            raise StaleEpoch(
                f"round: {call.round} of epoch {call.epoch}, but round {running.call.round} of epoch "
                f"{running.call.epoch} of this session is in flight",
                running.call.epoch,
            )
        self.drop(call.context.session_id, StaleEpoch(f"epoch: {call.epoch} of this session has begun"))
        return False

    def _require_fit(self, call: VerifyCall) -> None:
        length, longest = call.context.base_length + 1, self._limits.max_context
        if length > longest:
            raise InvalidRequest(f"context: {length} tokens; at most {longest} fit a session")
        if len(call.tree) > self._limits.max_nodes:
            raise InvalidRequest(f"tree: {len(call.tree)} nodes; at most {self._limits.max_nodes} would do")
        if (deepest := call.context.base_length + int(call.tree.depths().max())) >= longest:
            # Beyond its context a model may place all tokens of a batch otherwise: other sessions' too.
            raise InvalidRequest(f"tree: a node at position {deepest}; positions from 0 to {longest - 1} would do")

    def _require_new(self, call: VerifyCall) -> None:
        """That a session may begin with this call: before it takes a slot."""
        if self.is_draining:
            raise Unavailable("this target worker is draining: it takes no new sessions; another one would")
        if start := call.context.context_start:
            if self._asks_first(call):
                self._reserve(call, [])
            raise PrefixMissing(
                f"context.context_start: {start} tokens were taken to be held, but the session is not known here; send "
                "its tokens from the beginning",
                held_hash=prefix_hash(()),
            )

    def _reserve(self, call: VerifyCall, held: Sequence[int]) -> None:
        """A slot for whoever waits for one, before it hears what is missing.

        When it sends that nobody has taken the room meanwhile; without room nothing need be sent. Raises Exhausted.
        """
        self.pool.rest(self._lease(call, Text([*held], call.context.cache_salt)))

    def _asks_first(self, call: VerifyCall) -> bool:
        """Whether a call that lacks tokens has its room before it is told to send them."""
        return call.reserves or self.pool.is_waiting(call.context.session_id)

    def _lease(self, call: VerifyCall, text: Text) -> SessionSlot:
        """The call's session with room for it, for which younger ones give way where it has to grow."""
        name, (num_rows, most_rows) = call.context.session_id, self._rows(call)
        for session in self.pool.in_the_way(name, call.epoch, num_rows):
            self._preempt(session)
        return self.pool.lease(name, call.epoch, num_rows, text, most_rows)

    def _preempt(self, session: SessionSlot) -> None:
        self._left(session.session_id)
        self.drop(session.session_id, Preempted("KV memory is full: this session gave way to an older one"))
        self.pool.preempt(session)

    def _rows(self, call: VerifyCall) -> tuple[int, int]:
        """Of a slot for the text and up to a step more, and for all that the session may come to in its request.

        Beyond either a tree of about this size.
        """
        limits, now = self._limits, call.context.base_length + 1
        tree_rows = min(limits.max_nodes, _up_to_whole(limits.rows, len(call.tree)))  # so that a tree seldom needs more
        longest = min(limits.max_context, max(call.max_length or limits.max_context, now))
        return min(longest, _up_to_whole(limits.kv_step, now)) + tree_rows, longest + tree_rows


def _up_to_whole(step: int, number: int) -> int:
    return -(-number // step) * step
