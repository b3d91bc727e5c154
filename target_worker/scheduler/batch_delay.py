"""Whether a sweep should wait for sessions that draft and will be here in a moment.

Whoever comes just after a sweep has begun waits for all of it; a short wait before it lets those sessions ride along.
On their way are sessions that were answered moments ago, and others that are about to begin: callers say how many they
run, so nobody waits for a session that has ended. Where drafting takes long, sweeping at once is better: then sessions
take turns, one drafting while another is verified.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

WEIGHT = 0.25  # of the last time in what is typical
SLACK = 3.0  # typical times after which nobody is waited for
FORGET = 4.0  # times the longest wait after which a session has left


@dataclass(slots=True)
class _Typical:
    """How long something takes, as far as it was seen."""

    seconds: float | None = None

    def observe(self, seconds: float) -> None:
        self.seconds = seconds if self.seconds is None else self.seconds + WEIGHT * (seconds - self.seconds)

    def wait(self, longest: float) -> float:
        """How long it is waited for: not at all where it is unknown, or takes longer than is worth it."""
        if self.seconds is None or self.seconds > longest:
            return 0.0
        return min(longest, SLACK * self.seconds)


@dataclass(slots=True)
class _Caller:
    """What a caller says of itself."""

    num_running: int = 0  # sessions; 0 where it does not say
    said: float = 0.0  # when
    num_new: int = 0  # of these, such as nothing was heard of yet
    since: float = 0.0  # when it last spoke of more of those than before


class BatchDelay:
    """Expects sessions, as long as it is worth it. Times are seconds on any one clock."""

    def __init__(self, patience: float) -> None:
        """Waits at most `patience` times the last sweep's time; 0 is never."""
        self._patience = patience
        self._longest = 0.0  # wait before a sweep
        self._began: float | None = None  # to wait
        self._return = _Typical()  # from an answer to the next call
        self._beginning = _Typical()  # from the news of a session to its first call
        self._answered: dict[str, tuple[str, float]] = {}  # whose each is, and when, of those that are not back
        self._callers: dict[str, _Caller] = {}

    def swept(self, seconds: float) -> None:
        """A sweep has taken so long."""
        self._longest, self._began = self._patience * seconds, None

    def answered(self, session_id: str, now: float, caller: str = "") -> None:
        """A session has its answer."""
        if self._longest:
            self._answered[session_id] = caller, now

    def arrived(self, session_id: str, when: float, caller: str = "", num_running: int = 0) -> None:
        """A session has called. One that was away for long counts as late, however long that was."""
        if not self._longest:
            return
        told = self._callers.setdefault(caller, _Caller())
        _, answered = self._answered.pop(session_id, ("", None))
        if answered is not None:
            self._return.observe(min(when - answered, 2 * self._longest))
        elif told.num_new:
            told.num_new -= 1
            self._beginning.observe(min(max(0.0, when - told.since), 2 * self._longest))
        told.num_running, told.said = num_running, when

    def left(self, session_id: str) -> None:
        """A session will not be back."""
        self._answered.pop(session_id, None)

    def seconds(self, now: float, waiting: Mapping[str, int]) -> float:
        """How much longer the next sweep should wait; 0 is not at all. `waiting` are calls that are here, by caller."""
        away = self._away(now, waiting)
        returning = self._return.wait(self._longest)
        beginning = self._beginning.wait(self._longest) if self._beginning.seconds is not None else returning
        self._began = now if self._began is None else self._began
        until = now
        for caller, told in self._callers.items():
            answered = away[caller]
            num_expected = told.num_running - waiting.get(caller, 0) if told.num_running else len(answered)
            num_new = max(0, num_expected - len(answered))
            if num_new > told.num_new:
                told.since = told.said
            told.num_new = num_new
            if num_new:
                until = max(until, told.since + beginning)
            if answered and num_expected > 0:
                until = max(until, max(answered) + returning)
        return max(0.0, min(until, self._began + self._longest) - now)

    def _away(self, now: float, waiting: Mapping[str, int]) -> defaultdict[str, list[float]]:
        """When each caller's sessions were answered that may be back; those that are gone are forgotten."""
        away: defaultdict[str, list[float]] = defaultdict(list)
        for session_id, (caller, answered) in [*self._answered.items()]:
            if now - answered > FORGET * self._longest:
                del self._answered[session_id]
            else:
                away[caller].append(answered)
        self._callers = {name: told for name, told in self._callers.items() if name in waiting or name in away}
        return away
