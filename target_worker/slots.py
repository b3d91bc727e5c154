"""Which session holds which KV slot: a fixed number of slots, leased and reused. Owned by the sweep thread alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bough.errors import Exhausted, NotFound, StaleEpoch
from bough.messages import VerifyResult
from bough.model.kv import KVSlot


@dataclass(slots=True)
class HeldSession:
    """A session with a slot."""

    session_id: str
    slot: KVSlot
    epoch: int
    last_used: float  # seconds on the pool's clock
    last_round: int = -1
    last_result: VerifyResult | None = None  # the answer to last_round, for a caller who asks again
    is_busy: bool = field(default=False)  # a call is in flight


class SlotPool:
    """Leases slots to sessions; a session that has been idle for `lease_seconds` may lose its slot to another."""

    def __init__(
        self, num_slots: int, make_slot: Callable[[], KVSlot], lease_seconds: float, clock: Callable[[], float]
    ) -> None:
        self.num_slots = num_slots
        self._make_slot = make_slot
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._sessions: dict[str, HeldSession] = {}
        self._free: list[KVSlot] = []  # slots are made when first wanted, and kept

    def __len__(self) -> int:
        """Sessions held now."""
        return len(self._sessions)

    def get(self, session_id: str) -> HeldSession | None:
        """The session if it is held."""
        return self._sessions.get(session_id)

    def lease(self, session_id: str, epoch: int) -> HeldSession:
        """The session's slot, or a new one for it.

        Raises:
            StaleEpoch: it has been placed anew since this epoch.
            Exhausted: every slot is leased.
        """
        session = self._sessions.get(session_id)
        if session is None:
            session = HeldSession(session_id, self._take_slot(), epoch, self._clock())
            self._sessions[session_id] = session
        if epoch < session.epoch:
            raise StaleEpoch(f"epoch: {epoch} of session {session_id} is over; {session.epoch} has begun")
        if epoch > session.epoch:
            session.epoch, session.last_round, session.last_result = epoch, -1, None
        session.last_used = self._clock()
        return session

    def release(self, session_id: str) -> None:
        """Frees a session's slot.

        Raises:
            NotFound: it holds none.
        """
        session = self._sessions.pop(session_id, None)
        if session is None:
            raise NotFound(f"session_id: {session_id!r} is not held here")
        self._give_back(session.slot)

    def _take_slot(self) -> KVSlot:
        if not self._free and len(self._sessions) == self.num_slots:
            self._evict()
        return self._free.pop() if self._free else self._make_slot()

    def _evict(self) -> None:
        idle = [session for session in self._sessions.values() if not session.is_busy]
        oldest = min(idle, key=lambda session: session.last_used, default=None)
        if oldest is None or self._clock() - oldest.last_used < self._lease_seconds:
            raise Exhausted(f"all {self.num_slots} KV slots are in use; try again, or start with more --kv-memory")
        self.release(oldest.session_id)

    def _give_back(self, slot: KVSlot) -> None:
        slot.tokens.clear()
        self._free.append(slot)

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls."""
        slots = [session.slot for session in self._sessions.values()] + self._free
        assert len(slots) <= self.num_slots, "more slots than the budget allows"
        assert len({id(slot) for slot in slots}) == len(slots), "a slot has two owners"
        assert all(slot.length == 0 for slot in self._free), "a free slot holds tokens"
        assert all(slot.length <= slot.num_rows for slot in slots), "a slot holds more tokens than rows"
