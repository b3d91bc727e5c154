"""Whether a sweep should wait for sessions that were answered moments ago and will be back when they have drafted.

Whoever comes just after a sweep has begun waits for all of it; a short wait before it lets those sessions ride along.
Where drafting takes long, sweeping at once is better: then sessions take turns, one drafting while another is verified.
"""

from __future__ import annotations

WEIGHT = 0.25  # of the last return in what is typical
SLACK = 3.0  # typical times of a return after which nobody is waited for
FORGET = 4.0  # times the longest wait after which a session has left


class Gathering:
    """Expects those back who were answered, as long as it is worth it. Times are seconds on any one clock."""

    def __init__(self, patience: float) -> None:
        """Waits at most `patience` times the last sweep's time; 0 is never."""
        self._patience = patience
        self._longest = 0.0  # wait after an answer
        self._typical: float | None = None  # from an answer to the next call
        self._answered: dict[str, float] = {}  # when each was that has not come back

    def swept(self, seconds: float) -> None:
        """A sweep has taken so long."""
        self._longest = self._patience * seconds

    def answered(self, session_id: str, now: float) -> None:
        """A session has its answer."""
        if self._longest:
            self._answered[session_id] = now

    def arrived(self, session_id: str, when: float) -> None:
        """A session has called. One that was away for long counts as late, however long that was."""
        answered = self._answered.pop(session_id, None)
        if answered is not None:
            seconds = min(when - answered, 2 * self._longest)
            self._typical = seconds if self._typical is None else self._typical + WEIGHT * (seconds - self._typical)

    def left(self, session_id: str) -> None:
        """A session will not be back."""
        self._answered.pop(session_id, None)

    def seconds(self, now: float) -> float:
        """How much longer the next sweep should wait; 0 is not at all."""
        gone = [who for who, answered in self._answered.items() if now - answered > FORGET * self._longest]
        for who in gone:
            del self._answered[who]
        if self._typical is None or self._typical > self._longest:
            return 0.0
        wait = min(self._longest, SLACK * self._typical)
        return max([0.0, *(answered + wait - now for answered in self._answered.values())])
