"""How long a sweep should wait for sessions that are still drafting.

A call that misses a sweep waits for all of it, so a short delay before the sweep lets it join. The delay expects new
sessions, and sessions that were answered moments ago. Callers report how many sessions they run, so no sweep waits for
an ended session. If drafting takes long, no delay is better: sessions then alternate, one drafting while another is
verified.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from bough.protocol.ids import ScopedId

WEIGHT = 0.25  # of the latest observation in the moving average
SLACK = 3.0  # multiples of the average after which a sweep does not wait for a session
FORGET = 4.0  # multiples of the longest delay after which a session is forgotten


@dataclass(slots=True)
class _Typical:
    """Moving average of a duration."""

    seconds: float | None = None

    def observe(self, seconds: float) -> None:
        self.seconds = seconds if self.seconds is None else self.seconds + WEIGHT * (seconds - self.seconds)

    def wait(self, longest: float) -> float:
        """How long to wait for it: 0 if unknown, or if longer than `longest`."""
        if self.seconds is None or self.seconds > longest:
            return 0.0
        return min(longest, SLACK * self.seconds)


@dataclass(slots=True)
class _Caller:
    """What a caller reports."""

    num_running: int = 0  # sessions; 0 if not reported
    reported: float = 0.0  # time of that report
    num_new: int = 0  # running sessions that have neither called nor been answered yet
    since: float = 0.0  # when num_new last grew


class BatchDelay:
    """Decides how long to wait for expected sessions. Times are seconds on one clock."""

    def __init__(self, max_delay: float) -> None:
        """Wait at most `max_delay` times the last sweep's time; 0 never waits."""
        self._max_delay = max_delay
        self._longest = 0.0  # delay before a sweep
        self._began: float | None = None  # when the current delay began
        self._return = _Typical()  # from an answer to the session's next call
        self._beginning = _Typical()  # from the report of a new session to its first call
        self._answered: dict[ScopedId, tuple[str, float]] = {}  # (caller, time) by answered session
        self._callers: dict[str, _Caller] = {}

    def swept(self, seconds: float) -> None:
        self._longest = self._max_delay * seconds

    def begins(self) -> None:
        """Note that a sweep begins: the next one waits anew."""
        self._began = None

    def answered(self, session_id: ScopedId, now: float, caller: str = "") -> None:
        if self._longest:
            self._answered[session_id] = caller, now

    def arrived(self, session_id: ScopedId, when: float, caller: str = "", num_running: int = 0) -> None:
        """Record a session's call. Long absences are capped, to keep them from dominating the average."""
        if not self._longest:
            return
        state = self._callers.setdefault(caller, _Caller())
        _, answered = self._answered.pop(session_id, ("", None))
        if answered is not None:
            self._return.observe(min(when - answered, 2 * self._longest))
        elif state.num_new:
            state.num_new -= 1
            self._beginning.observe(min(max(0.0, when - state.since), 2 * self._longest))
        state.num_running, state.reported = num_running, when

    def left(self, session_id: ScopedId) -> None:
        """Forget a session that will not return soon."""
        self._answered.pop(session_id, None)

    def seconds(self, now: float, waiting: Mapping[str, int]) -> float:
        """Seconds to delay the next sweep further; 0 is none. `waiting` counts waiting calls by caller."""
        away = self._away(now, waiting)
        returning = self._return.wait(self._longest)
        beginning = self._beginning.wait(self._longest) if self._beginning.seconds is not None else returning
        self._began = now if self._began is None else self._began
        until = now
        for caller, state in self._callers.items():
            answered = away[caller]
            num_expected = state.num_running - waiting.get(caller, 0) if state.num_running else len(answered)
            num_new = max(0, num_expected - len(answered))
            if num_new > state.num_new:
                state.since = state.reported
            state.num_new = num_new
            if num_new:
                until = max(until, state.since + beginning)
            if answered and num_expected > 0:
                until = max(until, max(answered) + returning)
        return max(0.0, min(until, self._began + self._longest) - now)

    def _away(self, now: float, waiting: Mapping[str, int]) -> defaultdict[str, list[float]]:
        """Times of answers by caller, for sessions that may return; forget the others."""
        away: defaultdict[str, list[float]] = defaultdict(list)
        for session_id, (caller, answered) in [*self._answered.items()]:
            if now - answered > FORGET * self._longest:
                del self._answered[session_id]
            else:
                away[caller].append(answered)
        self._callers = {name: state for name, state in self._callers.items() if name in waiting or name in away}
        return away
