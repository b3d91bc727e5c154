"""Which session holds which rows of KV: a budget of bytes, leased, kept for whoever begins alike, and evicted.

Owned by the sweep thread alone, but for `figures`, which any thread may ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from bough.errors import Exhausted, NotFound
from bough.model.arena import Arena
from bough.model.slot import Slot
from bough.prefix import BLOCK_TOKENS, common_length, whole_blocks
from bough.prefix_index import PrefixIndex
from target_worker.held import HeldSession, SlotState, Text


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


class SlotPool:
    """Leases rows of an arena to sessions.

    A session keeps its slot while a call is in flight and for `lease_seconds` after it. Then it is idle: it may still
    be called, or another may begin from what it holds, until its rows are wanted. Those used longest ago go first.
    """

    def __init__(self, arena: Arena, lease_seconds: float, clock: Callable[[], float]) -> None:
        self._arena = arena
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._sessions: dict[str, HeldSession] = {}
        self._slots: dict[HeldSession, None] = {}  # those of released sessions too
        self._index: PrefixIndex[HeldSession] = PrefixIndex()
        self._num_evictions = self._num_sent = self._num_computed = 0

    def __len__(self) -> int:
        """Sessions that have a slot."""
        return len(self._sessions)

    @contextmanager
    def scratch(self, num_rows: int) -> Iterator[Slot]:
        """Rows that are no session's, while there are enough that nobody holds."""
        slot = self._arena.take(num_rows)
        try:
            yield slot
        finally:
            self._arena.give_back(slot)

    def get(self, session_id: str) -> HeldSession | None:
        """The session if it has a slot."""
        return self._sessions.get(session_id)

    def lease(self, session_id: str, epoch: int, num_rows: int, text: Text) -> HeldSession:
        """The session with room for `num_rows`, a call of its in flight, standing on as much of a text as is held.

        What its own slot has in common with the text stays; what another slot has beyond that is copied.

        Raises:
            StaleEpoch: it has been placed anew since this epoch.
            Exhausted: there is no room; nothing has changed.
        """
        session = self._sessions.get(session_id)
        if session is None:
            session = self._open(session_id, num_rows, text)
        else:
            session.require_epoch(epoch)
            self._grow(session, num_rows)
        if epoch > session.epoch:
            session.epoch, session.last_round, session.last_result = epoch, -1, None
        session.is_busy = True
        if session.state is SlotState.IDLE:
            session.become(SlotState.HELD)
        slot = session.slot
        session.cache_salt = text.cache_salt
        self._roll_back(session, common_length(slot.tokens, text.tokens))
        self.borrow(session, text)
        return session

    def borrow(self, session: HeldSession, text: Text) -> None:
        """Copies what another slot holds of the text, in whole blocks, beyond what the session's own does."""
        slot = session.slot
        if slot.length == len(text.tokens):
            return
        match = self._index.longest(text.tokens, text.hashes, text.cache_salt)
        if match is not None and match.length > slot.length:
            match.holder.last_used = self._clock()
            slot.fork(match.holder.slot, match.length)
            self._follow(session)

    def commit(self, session: HeldSession, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Commits tokens whose keys and values stand in `rows`."""
        session.slot.compact(rows, tokens)
        self._follow(session)

    def rest(self, session: HeldSession) -> None:
        """The session's call is over; its caller is expected back within the lease."""
        session.is_busy = False
        session.last_used = self._clock()
        session.leased_until = session.last_used + self._lease_seconds

    def abandon(self, session: HeldSession) -> None:
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
        session = self._sessions.pop(session_id, None)
        if session is None:
            raise NotFound(f"session_id: {session_id!r} is not held here")
        session.session_id, session.last_result, session.is_busy = "", None, False
        if session.state is SlotState.HELD:
            session.become(SlotState.IDLE)
        if session.slot.length < BLOCK_TOKENS:
            self._give_back(session)

    def figures(self) -> PoolFigures:
        """For whoever looks on; any thread."""
        now, row_bytes = self._clock(), self._arena.row_bytes
        slots = list(self._slots)
        held = [s for s in slots if s.state is SlotState.HELD and (s.is_busy or now < s.leased_until)]
        held_rows, all_rows = (sum(session.slot.num_rows for session in some) for some in (held, slots))
        return PoolFigures(
            num_sessions=len(self._sessions),
            num_held=len(held),
            num_idle=len(slots) - len(held),
            num_bytes=self._arena.num_rows * row_bytes,
            held_bytes=held_rows * row_bytes,
            idle_bytes=(all_rows - held_rows) * row_bytes,
            num_tokens=sum(session.slot.length for session in slots),
            num_evictions=self._num_evictions,
            num_sent=self._num_sent,
            num_computed=self._num_computed,
        )

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls."""
        self._arena.check_integrity()
        assert {s.session_id: s for s in self._slots if s.session_id} == self._sessions, "a session has lost its slot"
        assert self._arena.num_free == self._arena.num_rows - sum(s.slot.num_rows for s in self._slots), "rows are lost"
        for session in self._slots:
            assert session.state in (SlotState.HELD, SlotState.IDLE), f"a slot stayed {session.state.value}"
            assert session.state is SlotState.HELD or not session.is_busy, "a call is in flight in an idle slot"
        self._index.check_integrity([*self._slots])

    def _open(self, session_id: str, num_rows: int, text: Text) -> HeldSession:
        """A slot for a new session: rows of its own, or an idle slot where that loses nothing or no other room is."""
        self._expire()
        match = self._index.longest(text.tokens, text.hashes, text.cache_salt)
        source, length = match if match is not None else (None, 0)
        idle = source if source is not None and source.state is SlotState.IDLE else None
        is_spare = idle is not None and not idle.session_id and length == whole_blocks(idle.slot.length)
        if is_spare or not self._make_room(num_rows, keep=source):
            if idle is None or not self._make_room(num_rows - idle.slot.num_rows, keep=idle):
                raise self._exhausted(num_rows)
            session = self._take_over(idle, length, num_rows)
        else:
            session = HeldSession("", self._arena.take(num_rows), epoch=-1)
            self._follow(session)
            session.become(SlotState.HELD)
        session.session_id = session_id
        self._sessions[session_id] = session
        self._slots[session] = None
        return session

    def _take_over(self, session: HeldSession, length: int, num_rows: int) -> HeldSession:
        """An idle slot, of which the first `length` tokens stay, for somebody else."""
        if self._sessions.pop(session.session_id, None) is not None:
            self._num_evictions += 1
        session.epoch, session.last_round, session.last_result = -1, -1, None
        self._roll_back(session, length)
        self._arena.resize(session.slot, num_rows)
        return session

    def _grow(self, session: HeldSession, num_rows: int) -> None:
        extra = num_rows - session.slot.num_rows
        if extra <= 0:
            return
        self._expire()
        if not self._make_room(extra, keep=session):
            raise self._exhausted(extra)
        self._arena.resize(session.slot, num_rows)

    def _roll_back(self, session: HeldSession, length: int) -> None:
        if length < session.slot.length:
            session.slot.roll_back(length)
            self._follow(session)

    def _follow(self, session: HeldSession) -> None:
        """The index knows what a session's slot holds now."""
        self._index.follow(session, session.slot.tokens, session.cache_salt)

    def _expire(self) -> None:
        """Sessions whose lease has run out become idle."""
        now = self._clock()
        for session in self._slots:
            if session.state is SlotState.HELD and not session.is_busy and now >= session.leased_until:
                session.become(SlotState.IDLE)

    def _make_room(self, num_rows: int, keep: HeldSession | None) -> bool:
        """Takes from idle slots until so many rows are free: what they do not use, and then all, the oldest first.

        Nothing changes where that is not enough. `keep` is spared.
        """
        idle = [session for session in self._slots if session.state is SlotState.IDLE and session is not keep]
        idle.sort(key=lambda session: session.last_used)
        if self._arena.num_free + sum(session.slot.num_rows for session in idle) < num_rows:
            return False
        for session in idle:
            if self._arena.num_free < num_rows and session.slot.length >= BLOCK_TOKENS:
                self._arena.resize(session.slot, session.slot.length)
        for session in idle:
            if self._arena.num_free < num_rows:
                self._num_evictions += session.slot.length > 0
                self._give_back(session)
        return True

    def _give_back(self, session: HeldSession) -> None:
        session.become(SlotState.EVICTING)
        self._sessions.pop(session.session_id, None)
        self._index.forget(session)
        del self._slots[session]
        self._arena.give_back(session.slot)
        session.become(SlotState.FREE)

    def _exhausted(self, num_rows: int) -> Exhausted:
        figures, wanted = self.figures(), num_rows * self._arena.row_bytes
        free = figures.num_bytes - figures.held_bytes
        return Exhausted(
            f"KV memory: {wanted} bytes are wanted for {num_rows} tokens, but {free} of {figures.num_bytes} are free: "
            f"{figures.num_held} sessions in use hold the rest; try again, or start with more --kv-memory"
        )
