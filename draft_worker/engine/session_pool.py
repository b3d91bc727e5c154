"""The sessions of a draft worker: rows of one budget; the least recently used one is evicted, which only costs time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from bough.errors import NotFound
from bough.model.kv.arena import Arena
from bough.model.kv.slot import Slot
from bough.protocol.ids import ScopedId
from bough.protocol.messages import GrowCall
from bough.protocol.prefix_hash import BLOCK_TOKENS, PrefixIndex, block_hashes, common_length, whole_blocks
from draft_worker.engine.session import DraftSession, Window

SPARE_ROWS = 512  # added to what a call needs, for the text and expansions to grow


class SessionPool:
    """Gives each session as many rows as its calls need. Used by the engine's thread only."""

    def __init__(self, arena: Arena, window: Window, ahead_rows: int = 0, state_bytes: int = 0) -> None:
        """The arena must keep all rows of a slot that it moves, and have at least `window.max_rows` rows.

        A slot gets up to `ahead_rows` more for draft-ahead, but at most a quarter of the free rows: new sessions should
        not have to evict it. `state_bytes` is the size of a session's states, in addition to its rows.
        """
        self._arena, self.window, self._ahead_rows, self._state_bytes = arena, window, ahead_rows, state_bytes
        self._sessions: OrderedDict[ScopedId, DraftSession] = OrderedDict()  # least recently used first
        self._index: PrefixIndex[DraftSession] = PrefixIndex()

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._sessions

    @property
    def num_bytes(self) -> int:
        """The budget."""
        return self._arena.num_rows * self._arena.row_bytes + self._arena.most_slots * self._state_bytes

    def used_bytes(self, busy: Container[ScopedId]) -> int:
        """KV and state bytes of the sessions in `busy`, which cannot be evicted."""
        held = [session for name, session in list(self._sessions.items()) if name in busy]
        rows = sum(session.slot.num_rows for session in held)
        return rows * self._arena.row_bytes + len(held) * self._state_bytes

    def holds(self, session_id: ScopedId, session: DraftSession) -> bool:
        """Whether `session` is still the session of this id."""
        return self._sessions.get(session_id) is session

    def take(self, call: GrowCall, busy: Container[ScopedId]) -> DraftSession | None:
        """The call's session with room for its tree; None if the room belongs to `busy` sessions."""
        session_id = call.context.session_id
        session = self._sessions.get(session_id)
        needed = self.window.num_rows(call.context.base_length, call.plan.growth.max_expansions)
        if session is None or session.slot.num_rows < needed:
            own = session.slot.num_rows if session else 0
            spare = SPARE_ROWS + min(self._ahead_rows, self._arena.num_free // 4)
            wanted = min(needed + spare, self.window.max_rows)
            if not self._make_room(wanted - own, session, busy):
                wanted = needed  # rather than waiting for other sessions
                if not self._make_room(wanted - own, session, busy):
                    return None
            if session is None:
                session = self._sessions[session_id] = DraftSession(self._arena.take(wanted), self.window)
            else:
                self._arena.resize(session.slot, wanted)
        self._sessions.move_to_end(session_id)
        session.epoch, session.cache_salt = max(session.epoch, call.epoch), call.context.cache_salt
        return session

    def epoch_of(self, session_id: ScopedId) -> int:
        """The newest epoch that the session was called with; 0 if it has no slot."""
        session = self._sessions.get(session_id)
        return session.epoch if session is not None else 0

    def copy_prefix(self, session: DraftSession) -> None:
        """Copy whole blocks of another session's KV for text that this one has not run yet.

        States are saved for later copies where the texts diverge, and for the session itself at the end of a long text.
        """
        if session.num_pending < (BLOCK_TOKENS if self._arena.most_slots else 1):
            return
        text = session.tokens[session.start :]
        salt = session.cache_salt
        match = self._index.longest(text, block_hashes(text, cache_salt=salt), salt)
        if match is not None:
            source, length = self._source(session, match.holder, text)
            if length > session.slot.length:
                session.slot.fork(source, length)
        session.slot.snapshot_at({whole_blocks(len(text)), match.length if match is not None else 0})

    def _source(self, session: DraftSession, longest: DraftSession, text: list[int]) -> tuple[Slot, int]:
        """The slot from which most of a session's text can be copied, and how much; at most to a saved state."""
        others = [other for other in self._sessions.values() if other.cache_salt == session.cache_salt]
        slots = [other.slot for other in others] if self._arena.most_slots else [longest.slot]
        lengths = [slot.usable(whole_blocks(common_length(text, slot.tokens))) for slot in slots]  # as they are by now
        best = max(range(len(slots)), key=lengths.__getitem__)
        return slots[best], lengths[best]

    def note(self, session: DraftSession) -> None:
        """Index the session's cached tokens for other sessions to copy."""
        self._index.forget(session)
        self._index.follow(session, [*session.slot.tokens], session.cache_salt)

    def release(self, session_id: ScopedId) -> None:
        """Forget a session. Raises NotFound."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            raise NotFound("session_id", f"{session_id.name!r} has no slot here")
        self._index.forget(session)
        self._arena.give_back(session.slot)

    def check_now_and_then(self) -> None:
        """Check invariants after every N calls, where N grows with the number of slots."""
        if self._arena.is_check_due():
            self.check_integrity()

    def check_integrity(self) -> None:
        """Assert the invariants between steps."""
        self._arena.check_integrity()
        num_rows = sum(session.slot.num_rows for session in self._sessions.values())
        assert self._arena.num_free == self._arena.num_rows - num_rows, "rows are lost"
        for session in self._sessions.values():
            assert session.explored.base + len(session.explored) <= session.slot.num_rows, "more explored than fits"

    def _make_room(self, num_rows: int, keep: DraftSession | None, busy: Container[ScopedId]) -> bool:
        """Evict idle sessions until `num_rows` rows are free; evicts none if that is not enough.

        Without a session to `keep`, there must also be memory for another session's states.
        """
        free, evicted = self._arena.num_free, []
        has_place = keep is not None or not 0 < self._arena.most_slots <= len(self)
        for name, session in self._sessions.items():
            if free >= num_rows and has_place:
                break
            if name not in busy and session is not keep:
                evicted.append(name)
                free, has_place = free + session.slot.num_rows, True
        if free < num_rows or not has_place:
            return False
        for name in evicted:
            self.release(name)
        return True
