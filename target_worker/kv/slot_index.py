"""All slots, found by session or by text. Idle slots are evicted in parts.

Only the sweep thread uses it, except for figures that `target_worker.kv.slot_pool` reads.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bough.errors import StaleEpoch
from bough.grammar.allowed_tokens import AllowedTokens
from bough.model.kv.arena import Arena
from bough.model.kv.slot import Slot
from bough.protocol.ids import ScopedId
from bough.protocol.messages import VerifyResult
from bough.protocol.prefix_hash import BLOCK_TOKENS, PrefixIndex, PrefixMatch, block_hashes, common_length, whole_blocks

# Taking rows looks at every slot: without a limit, requests would become slower the longer a worker runs, if texts are
# short. More texts would hardly be reused more often.
MAX_IDLE = 2048


class SlotState(Enum):
    """States of a slot: FREE, HELD, IDLE, possibly HELD again, FREE."""

    FREE = "free"  # has no rows
    HELD = "held"  # its session has a call in flight or a current lease
    IDLE = "idle"  # without a lease: kept while there is room


_AFTER = {
    SlotState.FREE: {SlotState.HELD},
    SlotState.HELD: {SlotState.IDLE},
    SlotState.IDLE: {SlotState.HELD, SlotState.FREE},
}


class Text:
    """All of a session's tokens before the root, as sent by a call."""

    def __init__(self, tokens: list[int], cache_salt: str = "") -> None:
        self.tokens, self.cache_salt = tokens, cache_salt

    @cached_property
    def hashes(self) -> list[int]:
        """Hashes of the blocks of tokens; computed lazily, as calls without missing tokens need none."""
        return block_hashes(self.tokens, cache_salt=self.cache_salt)

    @cached_property
    def array(self) -> NDArray[np.int32]:
        """(num_tokens,), for comparison with other texts."""
        return np.asarray(self.tokens, np.int32)


@dataclass(slots=True, eq=False)
class SessionSlot:
    """A KV slot with the session that has it."""

    session_id: ScopedId  # without a name once released: other sessions may still copy its prefix
    slot: Slot
    epoch: int
    cache_salt: str = ""  # of the cached text
    state: SlotState = SlotState.FREE
    number: int = 0  # order in which sessions came to this pool
    most_rows: int = 0  # limit of rows in the present request
    last_used: float = 0.0  # seconds on the pool's clock
    leased_until: float = 0.0
    last_round: int = -1
    last_result: VerifyResult | None = None  # the answer to last_round, repeated if the caller asks again
    is_busy: bool = False  # whether a call is in flight
    allowed: AllowedTokens | None = None  # along the output, if its tokens are constrained

    @property
    def age(self) -> tuple[int, int]:
        """Sort key from the oldest to the youngest session: epochs are times at which requests began."""
        return self.epoch, self.number

    @property
    def num_growing(self) -> int:
        """Rows that the session may still ask for."""
        return max(0, self.most_rows - self.slot.num_rows)

    def become(self, state: SlotState) -> None:
        """Change the state; the only place that does."""
        assert state in _AFTER[self.state], f"a slot that is {self.state.value} cannot become {state.value}"
        self.state = state

    def require_epoch(self, epoch: int) -> None:
        """Raise StaleEpoch if the session has a newer epoch."""
        if epoch < self.epoch:
            raise StaleEpoch(f"epoch: must be at least {self.epoch}, the session's, got {epoch}", self.epoch)

    def require_round(self, epoch: int, number: int) -> None:
        """Raise StaleEpoch if a later round was answered: the call was delayed, and would undo newer tokens."""
        if epoch == self.epoch and number < self.last_round:
            raise StaleEpoch(f"round: must be at least {self.last_round}, the last one answered, got {number}")


def _last_used(session: SessionSlot) -> float:
    return session.last_used


class SlotIndex:
    """Slots of an arena, each with the text of a session or of a released one."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.sessions: dict[ScopedId, SessionSlot] = {}
        self.slots: dict[SessionSlot, None] = {}  # includes slots of released sessions
        self.held: dict[SessionSlot, None] = {}  # in state HELD; all others are idle
        self._idle: list[SessionSlot] = []  # least recently used first
        self.num_evictions = 0
        self._num_opened = 0
        self._index: PrefixIndex[SessionSlot] = PrefixIndex()

    def open(self, num_rows: int) -> SessionSlot:
        """Open an empty slot; there must be room."""
        session = SessionSlot(ScopedId(), self.arena.take(num_rows), epoch=-1)
        self.slots[session] = self.held[session] = None
        self.follow(session)
        session.become(SlotState.HELD)
        return session

    def hold(self, session: SessionSlot) -> None:
        """Lease a slot that is idle."""
        session.become(SlotState.HELD)
        del self._idle[self._place(session)]
        self.held[session] = None

    def let_go(self, session: SessionSlot) -> None:
        """End the lease of a slot. Of too many idle slots another one, unused for longest, is evicted."""
        session.become(SlotState.IDLE)
        session.allowed = None
        del self.held[session]
        insort(self._idle, session, key=_last_used)
        if len(self._idle) > MAX_IDLE:
            oldest = next(idle for idle in self._idle if idle is not session)
            self.num_evictions += oldest.slot.length > 0
            self.give_back(oldest)

    def touch(self, session: SessionSlot, now: float) -> None:
        """Count a slot as used now."""
        if session.state is SlotState.IDLE:
            del self._idle[self._place(session)]
            self._idle.append(session)
        session.last_used = now

    def take_over(self, session: SessionSlot, length: int, num_rows: int) -> None:
        """Prepare an idle slot for another session: keep `length` tokens, resize to `num_rows`; there must be room."""
        if self.sessions.pop(session.session_id, None) is not None:
            self.num_evictions += 1
        session.epoch, session.last_round, session.last_result, session.allowed = -1, -1, None, None
        self.roll_back(session, length)
        self.arena.resize(session.slot, num_rows)

    def name(self, session: SessionSlot, session_id: ScopedId) -> None:
        """Assign the slot to a session."""
        session.session_id, session.number = session_id, self._num_opened
        self._num_opened += 1
        self.sessions[session_id] = session

    def give_back(self, session: SessionSlot) -> None:
        """Return the rows of an idle slot and remove it."""
        session.become(SlotState.FREE)
        del self._idle[self._place(session)]
        self.sessions.pop(session.session_id, None)
        self._index.forget(session)
        del self.slots[session]
        self.arena.give_back(session.slot)

    def follow(self, session: SessionSlot) -> None:
        """Update the prefix index after a change of the slot's tokens."""
        self._index.follow(session, session.slot.tokens, session.cache_salt)

    def roll_back(self, session: SessionSlot, length: int) -> None:
        """Keep at most `length` tokens of the slot, and no more than are usable."""
        before = session.slot.length
        session.slot.roll_back(length)
        if session.slot.length < before:
            self.follow(session)

    def longest(self, text: Text) -> PrefixMatch[SessionSlot] | None:
        """The slot with the longest common prefix in whole blocks."""
        return self._index.longest(text.tokens, text.hashes, text.cache_salt)

    def longest_usable(self, text: Text) -> PrefixMatch[SessionSlot] | None:
        """The slot from which most of the text can be copied, in whole blocks."""
        match = self.longest(text)
        if match is None or not self.arena.most_slots:
            return match
        matches = []
        for session in self.slots:
            if session.cache_salt == text.cache_salt:
                common = whole_blocks(common_length(session.slot.tokens, text.array))
                matches.append(PrefixMatch(session, session.slot.usable(common)))
        best = max(matches, key=lambda found: found.length)
        return best if best.length else None

    @property
    def is_full(self) -> bool:
        """Whether there is no memory for another session's states."""
        return 0 < self.arena.most_slots <= len(self.held)

    def make_place(self, keep: SessionSlot | None) -> bool:
        """Make room for one more slot, evicting an idle one other than `keep` if necessary."""
        if not 0 < self.arena.most_slots <= len(self.slots):
            return True
        oldest = next((session for session in self._idle if session is not keep), None)
        if oldest is not None:
            self.num_evictions += oldest.slot.length > 0
            self.give_back(oldest)
        return oldest is not None

    def num_available(self, keep: SessionSlot | None) -> int:
        """Rows that are free or belong to idle slots except `keep`."""
        spared = keep.slot.num_rows if keep is not None and keep.state is SlotState.IDLE else 0
        return self.arena.num_rows - sum(session.slot.num_rows for session in self.held) - spared

    def make_room(self, num_rows: int, keep: SessionSlot | None) -> bool:
        """Free `num_rows` rows: first the unused rows of idle slots, then the ends of their texts, oldest use first.

        Returns False and changes nothing if that is not enough. `keep` is spared.
        """
        if self.arena.num_free >= num_rows:
            return True
        if self.num_available(keep) < num_rows:
            return False
        idle = [session for session in self._idle if session is not keep]
        for session in idle:
            length = session.slot.length
            if self.arena.num_free < num_rows and BLOCK_TOKENS <= length < session.slot.num_rows:
                self.arena.resize(session.slot, length)
        for session in idle:
            if (missing := num_rows - self.arena.num_free) <= 0:
                break
            self._cut(session, session.slot.num_rows - missing)
        return True

    def check_integrity(self) -> None:
        """Assert the invariants between calls."""
        self.arena.check_integrity()
        assert {s.session_id: s for s in self.slots if s.session_id} == self.sessions, "a session has lost its slot"
        num_rows = sum(session.slot.num_rows for session in self.slots)
        assert self.arena.num_free == self.arena.num_rows - num_rows, "rows are lost"
        assert self.held.keys() == {s for s in self.slots if s.state is SlotState.HELD}, "a held slot is not listed"
        idle = [session for session in self.slots if session.state is SlotState.IDLE]
        assert {*idle} == {*self._idle}, "an idle slot is not listed"
        assert [*map(_last_used, self._idle)] == sorted(map(_last_used, idle)), "idle slots are out of order"
        for session in self.slots:
            assert session.state in (SlotState.HELD, SlotState.IDLE), f"a slot stayed {session.state.value}"
            assert session.state is SlotState.HELD or not session.is_busy, "a call is in flight in an idle slot"
        self._index.check_integrity([*self.slots])

    def _place(self, session: SessionSlot) -> int:
        """Position of an idle slot in `_idle`."""
        return self._idle.index(session, bisect_left(self._idle, session.last_used, key=_last_used))

    def _cut(self, session: SessionSlot, num_rows: int) -> None:
        """Shrink an idle slot to the whole blocks that fit `num_rows` rows and are usable; remove it if none are."""
        fitting = whole_blocks(max(0, min(num_rows, session.slot.length)))
        if length := session.slot.usable(fitting):
            self.roll_back(session, length)
            self.arena.resize(session.slot, num_rows if length == fitting else length)
            return
        self.num_evictions += session.slot.length > 0
        self.give_back(session)
