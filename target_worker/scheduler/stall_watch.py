"""Whether a sweep that is under way gets anywhere: a read that hangs fails nothing, and says nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

STILL_SECONDS = 120.0  # no layer takes as long, on any machine that is worth using


class StallWatch:
    """Compares what has been done with what had been done when it was last asked."""

    def __init__(self, progress: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        """`progress` grows while something is done."""
        self._progress = progress
        self._clock = clock
        self._seen = -1
        self._since = clock()

    def trouble(self, is_running: bool) -> str:
        """What is wrong, in words; empty while all is well. `is_running` is whether anything is to be done."""
        now, done = self._clock(), self._progress()
        if not is_running or done != self._seen:
            self._seen, self._since = done, now
        still = now - self._since
        if still < STILL_SECONDS:
            return ""
        return f"a sweep has got no further for {still:.0f} seconds: a disk that hangs, or a device"
