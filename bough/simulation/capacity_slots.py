"""KV memory of a simulated target: slots grow in steps, and where it is full the youngest session gives way."""

from __future__ import annotations

from bisect import insort
from typing import Protocol

STEP_TOKENS = 256  # by which a target's slots grow (target_worker.kv.slot_pool)


class Holder(Protocol):
    """A session, as far as its slot is concerned."""

    number: int  # of its request: older ones are smaller
    slot_tokens: int  # that its slot has room for
    gives_way: bool  # whether it is to leave its slot before its next round

    @property
    def wanted_tokens(self) -> int:
        """Of its text and its next tree."""
        ...

    @property
    def final_tokens(self) -> int:
        """Of its text when it is whole."""
        ...


class SlotMemory:
    """The slots of one target. The oldest session always gets what it needs, so that all of them end."""

    def __init__(self, num_tokens: int) -> None:
        self.free_tokens = self._num_tokens = num_tokens
        self._running: list[Holder] = []  # the oldest first, here and below
        self._growing: list[Holder] = []  # those that wait for room

    def fits(self, session: Holder) -> bool:
        """Whether a new session may come in: nobody who is there waits for room, nor will at its next step."""
        spare = sum(min(STEP_TOKENS, max(0, each.final_tokens - each.slot_tokens)) for each in self._running)
        return not self._growing and self._missing(session) + spare <= self.free_tokens

    def enter(self, session: Holder) -> None:
        """A session that fits takes its first slot."""
        insort(self._running, session, key=_age)
        self._take(session)

    def has_room(self, session: Holder) -> bool:
        """Whether there is room for its next round; who waits already comes first."""
        return self._missing(session) <= (0 if self._growing else self.free_tokens)

    def grow(self, session: Holder) -> bool:
        """Whether a session has room for its next round; where not it waits until `settle` names it."""
        if not self.has_room(session):
            insort(self._growing, session, key=_age)
            return False
        self._take(session)
        return True

    def leave(self, session: Holder) -> None:
        """A session's slot is free again."""
        self._running.remove(session)
        if session in self._growing:
            self._growing.remove(session)
        self.free_tokens += session.slot_tokens
        session.slot_tokens, session.gives_way = 0, False

    def settle(self) -> tuple[list[Holder], list[Holder]]:
        """Sessions that waited for room and have it now, and sessions that had to leave for it.

        A session in the middle of a round cannot leave at once: it is told to, by `gives_way`, and the others wait.
        """
        going: list[Holder] = []
        gone: list[Holder] = []
        while self._growing:
            first, youngest = self._growing[0], self._running[-1]
            if self._missing(first) <= self.free_tokens:
                self._growing.remove(first)
                self._take(first)
                going.append(first)
            elif youngest in self._growing:
                self.leave(youngest)
                gone.append(youngest)
            else:
                youngest.gives_way = True
                return going, gone
        for session in self._running:
            session.gives_way = False
        return going, gone

    def _missing(self, session: Holder) -> int:
        steps = -(-session.wanted_tokens // STEP_TOKENS) * STEP_TOKENS
        wanted = min(steps, max(session.wanted_tokens, session.final_tokens), self._num_tokens)
        return max(0, wanted - session.slot_tokens)

    def _take(self, session: Holder) -> None:
        missing = self._missing(session)
        self.free_tokens -= missing
        session.slot_tokens += missing


def _age(session: Holder) -> int:
    return session.number
