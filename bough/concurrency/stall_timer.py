"""Detects work that has stalled: a read that hangs raises no error."""

from __future__ import annotations


class StallTimer:
    """Measures for how long there has been work without progress; without work there is no stall."""

    def __init__(self) -> None:
        self._num_done = -1
        self._since: float | None = None  # when work was first seen, if there has been no progress since

    def seconds(self, is_busy: bool, num_done: int, now: float) -> float:
        """Seconds, up to `now`, for which there was work and the counter `num_done` has not changed; 0 without work."""
        if not is_busy or num_done != self._num_done:
            self._num_done, self._since = num_done, now if is_busy else None
            return 0.0
        if self._since is None:
            self._since = now
        return now - self._since
