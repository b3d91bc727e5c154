"""All slots, found by session or by text. Idle slots are evicted in parts.

Only the sweep thread uses it, except for figures that `target_worker.kv.slot_pool` reads.
"""

from __future__ import annotations

from bough.model.kv.arena import Arena
from bough.protocol.prefix_hash import BLOCK_TOKENS, whole_blocks
from bough.protocol.prefix_index import PrefixIndex, PrefixMatch
from target_worker.kv.session_slot import SessionSlot, SlotState, Text


class SlotIndex:
    """Slots of an arena, each with the text of a session or of a released one."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.sessions: dict[str, SessionSlot] = {}
        self.slots: dict[SessionSlot, None] = {}  # includes slots of released sessions
        self.num_evictions = 0
        self._num_opened = 0
        self._index: PrefixIndex[SessionSlot] = PrefixIndex()

    def open(self, num_rows: int) -> SessionSlot:
        """Open an empty slot; there must be room."""
        session = SessionSlot("", self.arena.take(num_rows), epoch=-1)
        self.slots[session] = None
        self.follow(session)
        session.become(SlotState.HELD)
        return session

    def take_over(self, session: SessionSlot, length: int, num_rows: int) -> None:
        """Prepare an idle slot for another session: keep `length` tokens, resize to `num_rows`; there must be room."""
        if self.sessions.pop(session.session_id, None) is not None:
            self.num_evictions += 1
        session.epoch, session.last_round, session.last_result = -1, -1, None
        self.roll_back(session, length)
        self.arena.resize(session.slot, num_rows)

    def name(self, session: SessionSlot, session_id: str) -> None:
        """Assign the slot to a session."""
        session.session_id, session.number = session_id, self._num_opened
        self._num_opened += 1
        self.sessions[session_id] = session

    def give_back(self, session: SessionSlot) -> None:
        """Return the rows of an idle slot and remove it."""
        session.become(SlotState.EVICTING)
        self.sessions.pop(session.session_id, None)
        self._index.forget(session)
        del self.slots[session]
        self.arena.give_back(session.slot)
        session.become(SlotState.FREE)

    def follow(self, session: SessionSlot) -> None:
        """Update the prefix index after a change of what the slot holds."""
        self._index.follow(session, session.slot.tokens, session.cache_salt)

    def roll_back(self, session: SessionSlot, length: int) -> None:
        """Keep at most `length` tokens of the slot."""
        if length < session.slot.length:
            session.slot.roll_back(length)
            self.follow(session)

    def longest(self, text: Text) -> PrefixMatch[SessionSlot] | None:
        """The slot with the longest common prefix in whole blocks."""
        return self._index.longest(text.tokens, text.hashes, text.cache_salt)

    def idle(self, keep: SessionSlot | None) -> list[SessionSlot]:
        """All idle slots but `keep`, least recently used first."""
        idle = [session for session in self.slots if session.state is SlotState.IDLE and session is not keep]
        return sorted(idle, key=lambda session: session.last_used)

    def num_available(self, keep: SessionSlot | None) -> int:
        """Free rows plus those of idle slots but `keep`."""
        return self.arena.num_free + sum(session.slot.num_rows for session in self.idle(keep))

    def make_room(self, num_rows: int, keep: SessionSlot | None) -> bool:
        """Free `num_rows` rows: first the unused rows of idle slots, then the ends of their texts, oldest use first.

        Returns False and changes nothing if that is not enough. `keep` is spared.
        """
        if self.num_available(keep) < num_rows:
            return False
        idle = self.idle(keep)
        for session in idle:
            if self.arena.num_free < num_rows and session.slot.length >= BLOCK_TOKENS:
                self.arena.resize(session.slot, session.slot.length)
        for session in idle:
            if (missing := num_rows - self.arena.num_free) > 0:
                self._cut(session, session.slot.num_rows - missing)
        return True

    def check_integrity(self) -> None:
        """Assert the invariants between calls."""
        self.arena.check_integrity()
        assert {s.session_id: s for s in self.slots if s.session_id} == self.sessions, "a session has lost its slot"
        num_rows = sum(session.slot.num_rows for session in self.slots)
        assert self.arena.num_free == self.arena.num_rows - num_rows, "rows are lost"
        for session in self.slots:
            assert session.state in (SlotState.HELD, SlotState.IDLE), f"a slot stayed {session.state.value}"
            assert session.state is SlotState.HELD or not session.is_busy, "a call is in flight in an idle slot"
        self._index.check_integrity([*self.slots])

    def _cut(self, session: SessionSlot, num_rows: int) -> None:
        """Shrink an idle slot to the whole blocks that fit `num_rows` rows; remove it if none do."""
        length = whole_blocks(max(0, min(num_rows, session.slot.length)))
        if length:
            self.roll_back(session, length)
            self.arena.resize(session.slot, num_rows)
            return
        self.num_evictions += session.slot.length > 0
        self.give_back(session)
