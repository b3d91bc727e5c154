"""Whether a worker is left alone for a while: what calls that went wrong tell of it, and what only of a request."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from bough.errors import BoughError, Unavailable

FIRST_PAUSE_SECONDS = 1.0  # after a fault a worker is left alone for so long,
LONGEST_PAUSE_SECONDS = 30.0  # then twice as long each time
ENOUGH_SESSIONS = 2  # whose calls must fail, with no success between, before that is the worker's fault
MAX_SESSIONS = 64  # whose failures are remembered


def is_fault(exc: BoughError) -> bool:
    """Whether a call may succeed elsewhere or later: it had no answer, or one with an error that has no name."""
    return isinstance(exc, Unavailable) or type(exc) is BoughError


@dataclass(slots=True)
class Pause:
    """Grows from one fault to the next."""

    until: float = 0.0  # on the monotonic clock
    num_faults: int = 0  # in a row

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until

    def extend(self) -> None:
        """One more fault. One that comes during the pause belongs to the call before: all the calls that a worker's end
        has cut off are one fault, not many in a row."""
        if not self.is_over:
            return
        self.num_faults += 1
        seconds = FIRST_PAUSE_SECONDS * 2.0 ** min(self.num_faults - 1, 10)
        self.until = time.monotonic() + min(seconds, LONGEST_PAUSE_SECONDS)


@dataclass(slots=True)
class Health:
    """Of one worker, as this orchestrator has seen it.

    A worker that does not answer is left alone by everyone. One that answers a session's calls with errors is left
    alone by that session; by everyone once another session has fared alike and nobody better, for a single request that
    always fails is no fault of its workers.
    """

    _pause: Pause = field(default_factory=Pause)
    _pauses: OrderedDict[str, Pause] = field(default_factory=OrderedDict)  # of sessions whose calls failed
    _suspects: set[str] = field(default_factory=set)  # sessions whose calls failed since any call went well

    @property
    def is_good(self) -> bool:
        """Whether it is to be used."""
        return self._pause.is_over

    def is_good_for(self, session_id: str) -> bool:
        """Whether it is to be used by a session."""
        return self.is_good and (session_id not in self._pauses or self._pauses[session_id].is_over)

    def blame(self, session_id: str, exc: BoughError) -> None:
        """A call of a session has ended so."""
        if isinstance(exc, Unavailable):
            self.lost()
        else:
            self.failed(session_id)

    def lost(self) -> None:
        """It does not answer, or has gone."""
        self._pause.extend()

    def failed(self, session_id: str) -> None:
        """It answered a call of this session with an error that is its own, or with nonsense."""
        self._pauses.setdefault(session_id, Pause()).extend()
        if len(self._pauses) > MAX_SESSIONS:
            self._pauses.popitem(last=False)
        self._suspects.add(session_id)
        if len(self._suspects) >= ENOUGH_SESSIONS:
            self._suspects.clear()
            self._pause.extend()

    def succeeded(self, session_id: str) -> None:
        """It answered a call of this session well: whatever it was accused of, it works."""
        self._pause = Pause()
        self._suspects.clear()
        self._pauses.pop(session_id, None)
