"""Sessions that want room again at a target that is full: nobody younger comes in before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

ASKING_SECONDS = 2.0  # that nobody younger comes in after one of them has asked: callers ask several times a second
WAITING_SECONDS = 600.0  # that one which does not ask is remembered


class _Wish(NamedTuple):
    epoch: int
    asked: float  # seconds on the clock


class AdmissionOrder:
    """Who gave way, or was refused a step of its growth, and has not had its room since."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wishes: dict[str, _Wish] = {}

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._wishes

    def ask(self, session_id: str, epoch: int) -> None:
        """The session wants room, now."""
        now = self._clock()
        self._wishes = {name: wish for name, wish in self._wishes.items() if now - wish.asked < WAITING_SECONDS}
        self._wishes[session_id] = _Wish(epoch, now)

    def leave(self, session_id: str) -> None:
        """It has its room, or wants it no more."""
        self._wishes.pop(session_id, None)

    def num_before(self, session_id: str, epoch: int) -> int:
        """Older sessions that come first: those that have asked just now."""
        since = self._clock() - ASKING_SECONDS
        return sum(
            wish.epoch < epoch and wish.asked > since for name, wish in self._wishes.items() if name != session_id
        )
