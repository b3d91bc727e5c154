"""The KV slot pool: leases, eviction and prefix reuse within a budget of bytes.

Only the sweep thread uses it, except for `figures`, which any thread may call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from bough.errors import Exhausted, NotFound, Preempted
from bough.model.kv.arena import Arena
from bough.model.kv.slot import Slot
from bough.protocol.ids import ScopedId
from bough.protocol.prefix_hash import BLOCK_TOKENS, common_length, whole_blocks
from target_worker.kv.slot_index import SessionSlot, SlotIndex, SlotState, Text

MORE = ", or start with more --kv-memory"
TURN_SECONDS = 5.0  # after this time without a call a session is between two turns, not between two rounds
ASKING_SECONDS = 2.0  # an asking session precedes younger ones for this time; callers retry several times a second
WAITING_SECONDS = 600.0  # time for which a session that does not retry is remembered


class _Waiting(NamedTuple):
    epoch: int
    asked: float  # seconds on the clock


class AdmissionOrder:
    """Sessions that were preempted or could not grow, and have had no room since."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[ScopedId, _Waiting] = {}

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._waiting

    def ask(self, session_id: ScopedId, epoch: int) -> None:
        """Record that the session asks for room now."""
        now = self._clock()
        self._waiting = {name: one for name, one in self._waiting.items() if now - one.asked < WAITING_SECONDS}
        self._waiting[session_id] = _Waiting(epoch, now)

    def leave(self, session_id: ScopedId) -> None:
        """Remove a session that has its room or does not want any."""
        self._waiting.pop(session_id, None)

    def num_before(self, session_id: ScopedId, epoch: int) -> int:
        """The number of older sessions that have asked recently."""
        since = self._clock() - ASKING_SECONDS
        return sum(
            waiting.epoch < epoch and waiting.asked > since
            for name, waiting in self._waiting.items()
            if name != session_id
        )


class PoolFigures(NamedTuple):
    """State of the pool at a moment."""

    num_sessions: int  # with a slot
    num_held: int  # slots in state HELD
    num_idle: int
    num_bytes: int  # the budget
    held_bytes: int  # of slots that are held
    idle_bytes: int
    num_tokens: int  # committed, in all slots
    num_evictions: int  # since the start
    num_sent: int  # tokens of contexts that callers sent, as they did not expect them to be cached, since the start
    num_computed: int  # of num_sent; the others were copied from other slots or cached after all
    num_preemptions: int  # sessions in use that gave way to older ones, since the start


class SlotPool:
    """Leases rows of an arena to sessions.

    A session keeps its slot while a call is in flight and for `lease_seconds` after it, or between turns until a tenant
    that holds less wants its rows. Then the slot is idle: the
    session may still call, and others may copy its prefix, until its rows are needed. Least recently used slots are
    evicted first, each from its end. A session that must grow may also take rows of younger ones: see `to_preempt`.
    """

    def __init__(self, arena: Arena, lease_seconds: float, clock: Callable[[], float], step_rows: int = 0) -> None:
        """A session is admitted only if each session in use can then still grow by `step_rows`; otherwise it would soon
        be preempted."""
        self._index = SlotIndex(arena)
        self._step_rows = step_rows
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._order = AdmissionOrder(clock)
        self._num_sent = self._num_computed = self._num_preemptions = 0

    def __len__(self) -> int:
        """The number of sessions with a slot."""
        return len(self._index.sessions)

    @contextmanager
    def scratch(self, num_rows: int) -> Iterator[Slot]:
        """Lend free rows that belong to no session, as long as there are no sessions."""
        slot = self._index.arena.take(num_rows)
        try:
            yield slot
        finally:
            self._index.arena.give_back(slot)

    def get(self, session_id: ScopedId) -> SessionSlot | None:
        """The session's slot, if it has one."""
        return self._index.sessions.get(session_id)

    def is_waiting(self, session_id: ScopedId) -> bool:
        """Whether the session was preempted or could not grow, and has had no room since."""
        return session_id in self._order

    def to_preempt(self, session_id: ScopedId, epoch: int, num_rows: int) -> list[SessionSlot]:
        """Sessions in use to preempt for one to grow to `num_rows`, the youngest first; all younger than it.

        So the oldest session can always grow until it ends. The list is empty if preempting all would not suffice, or
        if the session does not hold its slot: a new session preempts nobody.
        """
        self._expire()
        session = self._index.sessions.get(session_id)
        if session is None or session.state is not SlotState.HELD:
            return []
        missing = num_rows - session.slot.num_rows - self._index.num_available(session)
        others = (other for other in self._index.held if other is not session)
        younger = sorted(
            (other for other in others if other.age > (epoch, session.number)), key=lambda other: other.age
        )
        giving_way = []
        while missing > 0 and younger:
            giving_way.append(younger.pop())
            missing -= giving_way[-1].slot.num_rows
        return giving_way if missing <= 0 else []

    def preempt(self, session: SessionSlot) -> None:
        """End the lease of a session in use; it waits for room before all younger ones."""
        self.end_lease(session)
        self._num_preemptions += 1
        self._order.ask(session.session_id, session.epoch)

    def lease(self, session_id: ScopedId, epoch: int, num_rows: int, text: Text, most_rows: int = 0) -> SessionSlot:
        """Lease the session's slot with room for `num_rows`, holding as much of `text` as is cached; starts a call.

        The common prefix of the slot and the text stays; what another slot has beyond that is copied. `most_rows` is
        the limit of rows in the present request. The session has no newer epoch.

        Raises:
            Preempted: the session was preempted, and there is no room for it yet.
            Exhausted: there is no room. A session that could not grow keeps what it holds.
        """
        self._expire()  # before anything else, as it may evict the session's own slot
        session = self._index.sessions.get(session_id)
        if session is None or session.state is SlotState.IDLE:
            self._require_entry(session_id, epoch, num_rows - (session.slot.num_rows if session is not None else 0))
        if session is None:
            session = self._open(session_id, num_rows, text)
        else:
            self._grow(session, epoch, num_rows)
        self._order.leave(session_id)
        session.most_rows = most_rows
        if epoch > session.epoch:
            session.epoch, session.last_round, session.last_result = epoch, -1, None
        if session.state is SlotState.IDLE:
            self._index.hold(session)
        slot = session.slot
        session.cache_salt = text.cache_salt
        self._index.roll_back(session, common_length(slot.tokens, text.tokens))
        shared = self._index.longest(text) if slot.length < len(text.tokens) else None
        self.copy_prefix(session, text)
        if slot.length < len(text.tokens):
            slot.snapshot_at({whole_blocks(len(text.tokens)), shared.length if shared is not None else 0})
        session.is_busy = True  # last: if a copy fails, no call has begun that would have to end, and no lease
        return session

    @property
    def shares_anywhere(self) -> bool:
        """Whether sessions may share prefixes of any length; sessions with states cannot."""
        return not self._index.arena.most_slots

    def drop_partial(self, session: SessionSlot) -> None:
        """Drop partial results of a sweep that failed midway."""
        session.slot.num_in_sweep = 0
        self._index.roll_back(session, session.slot.length)

    def forget_all(self) -> None:
        """Give back all slots, after all calls have ended: keys and values outside this process were lost."""
        for session in [*self._index.slots]:
            if session.state is SlotState.HELD:
                self._index.let_go(session)
            if session.state is SlotState.IDLE:  # otherwise `let_go` has evicted it
                self._index.give_back(session)

    def copy_prefix(self, session: SessionSlot, text: Text) -> None:
        """Copy whole blocks of the text that another slot has beyond the session's own."""
        slot = session.slot
        if slot.length == len(text.tokens):
            return
        match = self._index.longest_usable(text)
        if match is not None and match.length > slot.length:
            self._index.touch(match.holder, self._clock())
            slot.fork(match.holder.slot, match.length)
            self._index.follow(session)

    def commit(self, session: SessionSlot, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Commit tokens whose keys and values are in `rows`."""
        session.slot.num_in_sweep = 0
        session.slot.compact(rows, tokens)
        self._index.follow(session)

    def end_call(self, session: SessionSlot) -> None:
        """End the session's call; its lease starts."""
        session.is_busy, session.slot.num_in_sweep = False, 0
        self._index.touch(session, self._clock())
        session.leased_until = session.last_used + self._lease_seconds

    def end_lease(self, session: SessionSlot) -> None:
        """End the session's call and its lease."""
        self.end_call(session)
        session.leased_until = session.last_used
        self._index.let_go(session)

    def count(self, num_sent: int, num_computed: int) -> None:
        """Count the tokens of an answered call's context: those sent, and those computed."""
        self._num_sent += num_sent
        self._num_computed += num_computed

    def release(self, session_id: ScopedId) -> None:
        """Forget a session. Its slot stays idle until its rows are needed. Raises NotFound."""
        self._order.leave(session_id)
        session = self._index.sessions.pop(session_id, None)
        if session is None:
            raise NotFound("session_id", f"{session_id.name!r} has no slot here")
        session.session_id, session.last_result, session.is_busy = ScopedId(), None, False
        if session.state is SlotState.HELD:
            self._index.let_go(session)
        if session.slot.length < BLOCK_TOKENS:
            self._index.give_back(session)

    def figures(self) -> PoolFigures:
        """The pool's state; any thread."""
        now, row_bytes = self._clock(), self._index.arena.row_bytes
        slots = list(self._index.slots)
        held = [s for s in slots if s.state is SlotState.HELD and (s.is_busy or now < s.leased_until)]
        held_rows, all_rows = (sum(session.slot.num_rows for session in some) for some in (held, slots))
        return PoolFigures(
            num_sessions=len(self._index.sessions),
            num_held=len(held),
            num_idle=len(slots) - len(held),
            num_bytes=self._index.arena.num_rows * row_bytes,
            held_bytes=held_rows * row_bytes,
            idle_bytes=(all_rows - held_rows) * row_bytes,
            num_tokens=sum(session.slot.length for session in slots),
            num_evictions=self._index.num_evictions,
            num_sent=self._num_sent,
            num_computed=self._num_computed,
            num_preemptions=self._num_preemptions,
        )

    def check_now_and_then(self) -> None:
        """Check invariants after every N calls, where N grows with the number of slots."""
        if self._index.arena.is_check_due():
            self._index.check_integrity()

    def check_integrity(self) -> None:
        """Assert the invariants between calls."""
        self._index.check_integrity()

    def _open(self, session_id: ScopedId, num_rows: int, text: Text) -> SessionSlot:
        """A slot for a new session: an idle one if that loses nothing or no other room is left, otherwise new rows."""
        index, match = self._index, self._index.longest_usable(text)
        source, length = match if match is not None else (None, 0)
        idle = source if source is not None and source.state is SlotState.IDLE else None
        is_spare = idle is not None and not idle.session_id and length == whole_blocks(idle.slot.length)
        if is_spare or not index.make_place(keep=source) or not index.make_room(num_rows, keep=source):
            if idle is None or not index.make_room(num_rows - idle.slot.num_rows, keep=idle):
                raise self._exhausted(num_rows)
            session = idle
            index.take_over(session, length, num_rows)
        else:
            session = index.open(num_rows)
        index.name(session, session_id)
        return session

    def _grow(self, session: SessionSlot, epoch: int, num_rows: int) -> None:
        extra = num_rows - session.slot.num_rows
        if extra <= 0:
            return
        if not self._index.make_room(extra, keep=session):
            self.end_call(session)  # the slot keeps its tokens: the caller may retry
            self._order.ask(session.session_id, epoch)
            raise self._exhausted(extra)
        self._index.arena.resize(session.slot, num_rows)

    def _require_entry(self, session_id: ScopedId, epoch: int, num_rows: int) -> None:
        """Raise Exhausted or Preempted if a session must not be admitted with `num_rows` more rows.

        Preempted older sessions come first, and sessions in use must have room for their next step.
        """
        index, num_before = self._index, self._order.num_before(session_id, epoch)
        self._share_out(session_id, num_rows)
        spare = sum(min(self._step_rows, session.num_growing) for session in index.held)
        if session_id not in index.sessions and index.is_full:
            error = Exhausted(f"KV memory: the states of {len(index.held)} sessions in use fill it; try again{MORE}")
        elif num_before:
            error = Exhausted(f"KV memory: {num_before} sessions that began earlier wait for room; try again{MORE}")
        elif index.num_available(index.sessions.get(session_id)) < num_rows + spare:
            error = self._exhausted(num_rows, spare)
        else:
            return
        if session_id in self._order:
            self._order.ask(session_id, epoch)
            raise Preempted(str(error))
        raise error

    def _share_out(self, session_id: ScopedId, num_rows: int) -> None:
        """End leases until there is room for a session, of tenants that hold more than its own would with it.

        Only sessions between two turns lose theirs. The tenant that holds most loses first, its least recently used
        session first.
        """
        index, tenant, since = self._index, session_id.tenant, self._clock() - TURN_SECONDS
        wanted = num_rows + sum(min(self._step_rows, session.num_growing) for session in index.held)
        held = Counter[str]()
        for session in index.held:
            held[session.session_id.tenant] += session.slot.num_rows
        while index.is_full or index.num_available(index.sessions.get(session_id)) < wanted:
            between_turns = (s for s in index.held if not s.is_busy and s.last_used <= since)
            greedy = [s for s in between_turns if held[s.session_id.tenant] > held[tenant] + num_rows]
            if not greedy:
                return
            session = min(greedy, key=lambda s: (-held[s.session_id.tenant], s.last_used))
            held[session.session_id.tenant] -= session.slot.num_rows
            index.let_go(session)

    def _expire(self) -> None:
        """Sessions whose lease has ended become idle."""
        now = self._clock()
        for session in [s for s in self._index.held if not s.is_busy and now >= s.leased_until]:
            self._index.let_go(session)

    def _exhausted(self, num_rows: int, spare: int = 0) -> Exhausted:
        figures, wanted = self.figures(), num_rows * self._index.arena.row_bytes
        free = figures.num_bytes - figures.held_bytes
        return Exhausted(
            f"KV memory: {num_rows} tokens need {wanted} bytes, but {free} of {figures.num_bytes} are free; "
            f"{figures.num_held} sessions in use hold the rest{f', and may grow by {spare}' * (spare > 0)}; "
            f"try again{MORE}"
        )
