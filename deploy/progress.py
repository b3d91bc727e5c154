"""Whether a program that answers also gets anywhere: what a stall is."""

from __future__ import annotations

from bough.protocol.messages import WorkerInfo


class Progress:
    """Watches a worker's sweeps or draft steps.

    A worker stalls while calls wait or run and no sweep (or draft step) ends. One that has nothing to do does not
    stall, however long that lasts.
    """

    def __init__(self) -> None:
        self._num_passes = -1
        self._since: float | None = None  # when calls were first seen without a pass having ended since

    def stalled_seconds(self, info: WorkerInfo, now: float) -> float:
        """Takes in what a worker says of itself now: seconds for which calls have waited in vain; 0 where none do."""
        is_busy = info.num_waiting + info.num_running > 0
        if not is_busy or info.num_passes != self._num_passes:
            self._num_passes, self._since = info.num_passes, now if is_busy else None
            return 0.0
        if self._since is None:
            self._since = now
        return now - self._since
