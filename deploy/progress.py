"""Stalls: calls wait at a program that answers, but no sweep or draft step ends."""

from __future__ import annotations

from bough.protocol.messages import WorkerInfo


class Progress:
    """Counts the seconds for which a worker has stalled.

    A worker stalls while calls wait or run and no sweep (or draft step) ends; an idle one never does.
    """

    def __init__(self) -> None:
        self._num_passes = -1
        self._since: float | None = None  # when calls were first seen, if no pass has ended since

    def stalled_seconds(self, info: WorkerInfo, now: float) -> float:
        """Return for how many seconds, up to `now`, calls have waited while no pass ended; 0 without calls."""
        is_busy = info.num_waiting + info.num_running > 0
        if not is_busy or info.num_passes != self._num_passes:
            self._num_passes, self._since = info.num_passes, now if is_busy else None
            return 0.0
        if self._since is None:
            self._since = now
        return now - self._since
