"""Pauses workers after faults: which failed calls are a worker's fault, and which may be the request's."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from bough.errors import BoughError, Unavailable

FIRST_PAUSE_SECONDS = 1.0  # for which a worker is not used after its first fault
LONGEST_PAUSE_SECONDS = 30.0  # limit of the pause, which doubles with each fault
ENOUGH_SESSIONS = 2  # number of sessions whose calls must fail, with no success between, to be the worker's fault
MAX_SESSIONS = 64  # limit of sessions whose failures are remembered


def is_fault(exc: BoughError) -> bool:
    """Whether a call may succeed elsewhere or later: it got no answer, or an unspecified error."""
    return isinstance(exc, Unavailable) or type(exc) is BoughError


@dataclass(slots=True)
class Pause:
    """A pause that doubles from one fault to the next."""

    until: float = 0.0  # seconds on the monotonic clock
    num_faults: int = 0  # consecutive

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until

    def extend(self) -> None:
        """Count a fault and start a pause. A fault during a pause does not count: all calls that a worker's end
        interrupts are one fault.
        """
        if not self.is_over:
            return
        self.num_faults += 1
        seconds = FIRST_PAUSE_SECONDS * 2.0 ** min(self.num_faults - 1, 10)
        self.until = time.monotonic() + min(seconds, LONGEST_PAUSE_SECONDS)


@dataclass(slots=True)
class Health:
    """Health of one worker, as seen by this orchestrator.

    A worker that does not answer is paused for all sessions. One that answers a session's calls with errors is paused
    for that session, and for all once a second session fails with no success between: a single request that always
    fails is not its workers' fault.
    """

    _pause: Pause = field(default_factory=Pause)
    _pauses: OrderedDict[str, Pause] = field(default_factory=OrderedDict)  # by session whose calls failed
    _suspects: set[str] = field(default_factory=set)  # sessions whose calls failed since the last success

    @property
    def is_good(self) -> bool:
        return self._pause.is_over

    def is_good_for(self, session_id: str) -> bool:
        """Whether it is used for a session."""
        return self.is_good and (session_id not in self._pauses or self._pauses[session_id].is_over)

    def blame(self, session_id: str, exc: BoughError) -> None:
        """Record a session's failed call."""
        if isinstance(exc, Unavailable):
            self.lost()
        else:
            self.failed(session_id)

    def lost(self) -> None:
        """Record that it does not answer or has gone."""
        self._pause.extend()

    def failed(self, session_id: str) -> None:
        """Record that it answered this session's call with an error of its own, or with nonsense."""
        self._pauses.setdefault(session_id, Pause()).extend()
        if len(self._pauses) > MAX_SESSIONS:
            self._pauses.popitem(last=False)
        self._suspects.add(session_id)
        if len(self._suspects) >= ENOUGH_SESSIONS:
            self._suspects.clear()
            self._pause.extend()

    def succeeded(self, session_id: str) -> None:
        """Record success: all suspicions end."""
        self._pause = Pause()
        self._suspects.clear()
        self._pauses.pop(session_id, None)
