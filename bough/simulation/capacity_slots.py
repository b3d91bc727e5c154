"""KV memory of a simulated target: slots grow in steps, and the youngest session is preempted if it is full."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bough.simulation.capacity_workers import SimulatedSession

STEP_TOKENS = 256  # growth of a slot, as in target_worker.kv.slot_pool


class SlotMemory:
    """The slots of one target. The oldest session always gets the room it needs, so that all finish."""

    def __init__(self, num_tokens: int) -> None:
        self.free_tokens = self._num_tokens = num_tokens
        self._running: list[SimulatedSession] = []  # oldest first
        self._growing: list[SimulatedSession] = []  # sessions waiting for room, oldest first

    def fits(self, session: SimulatedSession) -> bool:
        """Whether a new session can enter without making a running one wait, now or at its next growth step."""
        spare = sum(min(STEP_TOKENS, max(0, each.final_tokens - each.slot_tokens)) for each in self._running)
        return not self._growing and self._missing(session) + spare <= self.free_tokens

    def enter(self, session: SimulatedSession) -> None:
        """Give a session that fits its first slot."""
        insort(self._running, session, key=_age)
        self._take(session)

    def has_room(self, session: SimulatedSession) -> bool:
        """Whether there is room for its next round; waiting sessions come first."""
        return self._missing(session) <= (0 if self._growing else self.free_tokens)

    def grow(self, session: SimulatedSession) -> bool:
        """Grow its slot for the next round and return True, or let it wait for `settle`."""
        if not self.has_room(session):
            insort(self._growing, session, key=_age)
            return False
        self._take(session)
        return True

    def leave(self, session: SimulatedSession) -> None:
        """Free a session's slot."""
        self._running.remove(session)
        if session in self._growing:
            self._growing.remove(session)
        self.free_tokens += session.slot_tokens
        session.slot_tokens, session.gives_way = 0, False

    def settle(self) -> tuple[list[SimulatedSession], list[SimulatedSession]]:
        """Returns waiting sessions that now have room, and sessions preempted for them.

        A session in a round is not preempted at once: `gives_way` is set, and the others wait for it.
        """
        resumed: list[SimulatedSession] = []
        preempted: list[SimulatedSession] = []
        while self._growing:
            first, youngest = self._growing[0], self._running[-1]
            if self._missing(first) <= self.free_tokens:
                self._growing.remove(first)
                self._take(first)
                resumed.append(first)
            elif youngest in self._growing:
                self.leave(youngest)
                preempted.append(youngest)
            else:
                youngest.gives_way = True
                return resumed, preempted
        for session in self._running:
            session.gives_way = False
        return resumed, preempted

    def _missing(self, session: SimulatedSession) -> int:
        needed = session.wanted_tokens
        if needed <= session.slot_tokens:  # as most often
            return 0
        steps = -(-needed // STEP_TOKENS) * STEP_TOKENS
        wanted = min(steps, max(needed, session.final_tokens), self._num_tokens)
        return max(0, wanted - session.slot_tokens)

    def _take(self, session: SimulatedSession) -> None:
        missing = self._missing(session)
        self.free_tokens -= missing
        session.slot_tokens += missing


def _age(session: SimulatedSession) -> int:
    return session.number
