"""Which session holds which rows of KV: a budget of bytes, leased, kept for whoever begins alike, and evicted.

Owned by the sweep thread alone, but for `figures`, which any thread may ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from bough.errors import Exhausted, NotFound, Preempted
from bough.model.kv.arena import Arena
from bough.model.kv.slot import Slot
from bough.protocol.prefix_hash import BLOCK_TOKENS, common_length, whole_blocks
from target_worker.kv.session_slot import SessionSlot, SlotState, Text
from target_worker.kv.slot_index import SlotIndex
from target_worker.kv.turns import AdmissionOrder

MORE = ", or start with more --kv-memory"


class PoolFigures(NamedTuple):
    """What the slots come to at a moment."""

    num_sessions: int  # that have a slot
    num_held: int  # slots
    num_idle: int
    num_bytes: int  # the budget
    held_bytes: int  # of slots that are held
    idle_bytes: int
    num_tokens: int  # committed, in all slots
    num_evictions: int  # since the start
    num_sent: int  # tokens of contexts that callers sent because they did not take them to be held, since the start
    num_computed: int  # of these; the others were copied, or held after all
    num_preemptions: int  # sessions in use that gave way to older ones, since the start


class SlotPool:
    """Leases rows of an arena to sessions.

    A session keeps its slot while a call is in flight and for `lease_seconds` after it. Then it is idle: it may still
    be called, or another may begin from what it holds, until its rows are wanted. Those used longest ago go first, each
    from its end. A session whose slot must grow may have the rows of younger ones too: see `in_the_way`.
    """

    def __init__(self, arena: Arena, lease_seconds: float, clock: Callable[[], float], step_rows: int = 0) -> None:
        """Nobody comes in unless each session in use could grow by `step_rows` after that: it would soon give way."""
        self._kept = SlotIndex(arena)
        self._step_rows = step_rows
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._turns = AdmissionOrder(clock)
        self._num_sent = self._num_computed = self._num_preemptions = 0

    def __len__(self) -> int:
        """Sessions that have a slot."""
        return len(self._kept.sessions)

    @contextmanager
    def scratch(self, num_rows: int) -> Iterator[Slot]:
        """Rows that are no session's, while there are enough that nobody holds."""
        slot = self._kept.arena.take(num_rows)
        try:
            yield slot
        finally:
            self._kept.arena.give_back(slot)

    def get(self, session_id: str) -> SessionSlot | None:
        """The session if it has a slot."""
        return self._kept.sessions.get(session_id)

    def is_waiting(self, session_id: str) -> bool:
        """Whether the session gave way, or was refused more room, and has not had it since."""
        return session_id in self._turns

    def in_the_way(self, session_id: str, epoch: int, num_rows: int) -> list[SessionSlot]:
        """Sessions in use that must give way for one to grow to `num_rows`: younger ones, the youngest first.

        So the oldest always has its room, ends, and leaves it to the next. None where they would give way in vain, or
        where the session does not hold its slot: whoever comes in pushes nobody out.
        """
        self._expire()
        session = self._kept.sessions.get(session_id)
        if session is None or session.state is not SlotState.HELD:
            return []
        missing = num_rows - session.slot.num_rows - self._kept.num_available(session)
        held = [other for other in self._kept.slots if other.state is SlotState.HELD and other is not session]
        younger = sorted((other for other in held if other.age > (epoch, session.number)), key=lambda other: other.age)
        giving_way = []
        while missing > 0 and younger:
            giving_way.append(younger.pop())
            missing -= giving_way[-1].slot.num_rows
        return giving_way if missing <= 0 else []

    def preempt(self, session: SessionSlot) -> None:
        """Its lease is over though it is in use: it waits for room, before all who are younger."""
        self.abandon(session)
        self._num_preemptions += 1
        self._turns.ask(session.session_id, session.epoch)

    def lease(self, session_id: str, epoch: int, num_rows: int, text: Text, most_rows: int = 0) -> SessionSlot:
        """The session with room for `num_rows`, a call of its in flight, standing on as much of a text as is held.

        What its own slot has in common with the text stays; what another slot has beyond that is copied. It may come
        to `most_rows` in its request.

        Raises:
            StaleEpoch: it has been placed anew since this epoch.
            Preempted: it gave way, and there is no room for it yet.
            Exhausted: there is no room. A session that has asked for more keeps what it holds.
        """
        session = self._kept.sessions.get(session_id)
        if session is not None:
            session.require_epoch(epoch)
        self._expire()
        if session is None or session.state is SlotState.IDLE:
            self._require_entry(session_id, epoch, num_rows - (session.slot.num_rows if session is not None else 0))
        if session is None:
            session = self._open(session_id, num_rows, text)
        else:
            self._grow(session, epoch, num_rows)
        self._turns.leave(session_id)
        session.most_rows = most_rows
        if epoch > session.epoch:
            session.epoch, session.last_round, session.last_result = epoch, -1, None
        session.is_busy = True
        if session.state is SlotState.IDLE:
            session.become(SlotState.HELD)
        slot = session.slot
        session.cache_salt = text.cache_salt
        self._kept.roll_back(session, common_length(slot.tokens, text.tokens))
        self.borrow(session, text)
        return session

    def borrow(self, session: SessionSlot, text: Text) -> None:
        """Copies what another slot holds of the text, in whole blocks, beyond what the session's own does."""
        slot = session.slot
        if slot.length == len(text.tokens):
            return
        match = self._kept.longest(text)
        if match is not None and match.length > slot.length:
            match.holder.last_used = self._clock()
            slot.fork(match.holder.slot, match.length)
            self._kept.follow(session)

    def commit(self, session: SessionSlot, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Commits tokens whose keys and values stand in `rows`."""
        session.slot.compact(rows, tokens)
        self._kept.follow(session)

    def rest(self, session: SessionSlot) -> None:
        """The session's call is over; its caller is expected back within the lease."""
        session.is_busy = False
        session.last_used = self._clock()
        session.leased_until = session.last_used + self._lease_seconds

    def abandon(self, session: SessionSlot) -> None:
        """Whoever called has gone: the lease is over."""
        self.rest(session)
        session.leased_until = session.last_used
        session.become(SlotState.IDLE)

    def count(self, num_sent: int, num_computed: int) -> None:
        """A call has been answered: tokens of its context that were sent, and that were computed."""
        self._num_sent += num_sent
        self._num_computed += num_computed

    def release(self, session_id: str) -> None:
        """Forgets a session. What it held may serve another one until the room is wanted.

        Raises:
            NotFound: it has no slot.
        """
        self._turns.leave(session_id)
        session = self._kept.sessions.pop(session_id, None)
        if session is None:
            raise NotFound(f"session_id: {session_id!r} is not held here")
        session.session_id, session.last_result, session.is_busy = "", None, False
        if session.state is SlotState.HELD:
            session.become(SlotState.IDLE)
        if session.slot.length < BLOCK_TOKENS:
            self._kept.give_back(session)

    def figures(self) -> PoolFigures:
        """For whoever looks on; any thread."""
        now, row_bytes = self._clock(), self._kept.arena.row_bytes
        slots = list(self._kept.slots)
        held = [s for s in slots if s.state is SlotState.HELD and (s.is_busy or now < s.leased_until)]
        held_rows, all_rows = (sum(session.slot.num_rows for session in some) for some in (held, slots))
        return PoolFigures(
            num_sessions=len(self._kept.sessions),
            num_held=len(held),
            num_idle=len(slots) - len(held),
            num_bytes=self._kept.arena.num_rows * row_bytes,
            held_bytes=held_rows * row_bytes,
            idle_bytes=(all_rows - held_rows) * row_bytes,
            num_tokens=sum(session.slot.length for session in slots),
            num_evictions=self._kept.num_evictions,
            num_sent=self._num_sent,
            num_computed=self._num_computed,
            num_preemptions=self._num_preemptions,
        )

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls."""
        self._kept.check_integrity()

    def _open(self, session_id: str, num_rows: int, text: Text) -> SessionSlot:
        """A slot for a new session: rows of its own, or an idle slot where that loses nothing or no other room is."""
        kept, match = self._kept, self._kept.longest(text)
        source, length = match if match is not None else (None, 0)
        idle = source if source is not None and source.state is SlotState.IDLE else None
        is_spare = idle is not None and not idle.session_id and length == whole_blocks(idle.slot.length)
        if is_spare or not kept.make_room(num_rows, keep=source):
            if idle is None or not kept.make_room(num_rows - idle.slot.num_rows, keep=idle):
                raise self._exhausted(num_rows)
            session = idle
            kept.take_over(session, length, num_rows)
        else:
            session = kept.open(num_rows)
        kept.name(session, session_id)
        return session

    def _grow(self, session: SessionSlot, epoch: int, num_rows: int) -> None:
        extra = num_rows - session.slot.num_rows
        if extra <= 0:
            return
        if not self._kept.make_room(extra, keep=session):
            self.rest(session)  # it asks again, and keeps what it holds until then
            self._turns.ask(session.session_id, epoch)
            raise self._exhausted(extra)
        self._kept.arena.resize(session.slot, num_rows)

    def _require_entry(self, session_id: str, epoch: int, num_rows: int) -> None:
        """That a session may come in, with so many rows more.

        Nobody who gave way comes before it, and it would not have to give way itself at the others' next step.
        """
        kept, num_before = self._kept, self._turns.num_before(session_id, epoch)
        held = [session for session in kept.slots if session.state is SlotState.HELD]
        spare = sum(min(self._step_rows, session.num_growing) for session in held)
        if num_before:
            error = Exhausted(f"KV memory: {num_before} sessions that began earlier wait for room; try again{MORE}")
        elif kept.num_available(kept.sessions.get(session_id)) < num_rows + spare:
            error = self._exhausted(num_rows, spare)
        else:
            return
        if session_id in self._turns:
            self._turns.ask(session_id, epoch)
            raise Preempted(str(error))
        raise error

    def _expire(self) -> None:
        """Sessions whose lease has run out become idle."""
        now = self._clock()
        for session in self._kept.slots:
            if session.state is SlotState.HELD and not session.is_busy and now >= session.leased_until:
                session.become(SlotState.IDLE)

    def _exhausted(self, num_rows: int, spare: int = 0) -> Exhausted:
        figures, wanted = self.figures(), num_rows * self._kept.arena.row_bytes
        free = figures.num_bytes - figures.held_bytes
        return Exhausted(
            f"KV memory: {wanted} bytes are wanted for {num_rows} tokens, but {free} of {figures.num_bytes} are free: "
            f"{figures.num_held} sessions in use hold the rest{f', and grow by {spare}' * (spare > 0)}; try again{MORE}"
        )
