"""The order in which sessions get room at a full target: older before younger."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

ASKING_SECONDS = 2.0  # an asking session goes before younger ones for so long; callers retry several times a second
WAITING_SECONDS = 600.0  # for which a session that does not retry is remembered


class _Waiting(NamedTuple):
    epoch: int
    asked: float  # seconds on the clock


class AdmissionOrder:
    """Sessions that were preempted or could not grow, and have had no room since."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._waiting

    def ask(self, session_id: str, epoch: int) -> None:
        """Record that the session asks for room now."""
        now = self._clock()
        self._waiting = {name: one for name, one in self._waiting.items() if now - one.asked < WAITING_SECONDS}
        self._waiting[session_id] = _Waiting(epoch, now)

    def leave(self, session_id: str) -> None:
        """Remove a session that has its room or wants none."""
        self._waiting.pop(session_id, None)

    def num_before(self, session_id: str, epoch: int) -> int:
        """The number of older sessions that have asked recently."""
        since = self._clock() - ASKING_SECONDS
        return sum(
            waiting.epoch < epoch and waiting.asked > since
            for name, waiting in self._waiting.items()
            if name != session_id
        )
