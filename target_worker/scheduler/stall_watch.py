"""Detects a sweep that has stalled: a read that hangs raises no error."""

from __future__ import annotations

import time
from collections.abc import Callable

STILL_SECONDS = 120.0  # no layer takes as long on any useful machine


class StallWatch:
    """Compares a progress counter with its value at the previous call."""

    def __init__(self, progress: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        """`progress` returns a counter that grows as work is done."""
        self._progress = progress
        self._clock = clock
        self._seen = -1
        self._since = clock()

    def trouble(self, is_running: bool) -> str:
        """Description of a stall; empty if there is none. `is_running` says whether there is work to do."""
        now, done = self._clock(), self._progress()
        if not is_running or done != self._seen:
            self._seen, self._since = done, now
        still = now - self._since
        if still < STILL_SECONDS:
            return ""
        return f"a sweep has made no progress for {still:.0f} seconds: a disk or a device hangs"
