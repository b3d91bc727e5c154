"""How late the event loop comes to what is due, and how many tasks it has.

Whatever blocks it holds up every stream, and shows here; so does what never ends. Something is due every
`PERIOD_SECONDS`, whether the loop has time for it or not: a pause of a second counts as the fifty that it held up, the
last of which was hardly late, and so percentiles are of moments and not of measurements.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager

from bough.concurrency.tasks import background
from orchestrator.sizing.totals import Histogram

PERIOD_SECONDS = 0.02
COUNT_SECONDS = 1.0  # between two counts of tasks
BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class LoopLag:
    """Notes how late each of many short sleeps ends while it runs."""

    def __init__(self) -> None:
        self.tally = Histogram(BOUNDS)  # seconds
        self.num_tasks = 0  # of the event loop, as they were counted last

    def running(self) -> AbstractAsyncContextManager[None]:
        """Measures for as long as the block runs."""
        return background(self._measure())

    async def _measure(self) -> None:
        next_count = 0.0
        due = time.monotonic() + PERIOD_SECONDS
        while True:
            await asyncio.sleep(due - time.monotonic())
            now = time.monotonic()
            while due <= now:
                self.tally.add(now - due)
                due += PERIOD_SECONDS
            if now >= next_count:
                self.num_tasks, next_count = len(asyncio.all_tasks()), now + COUNT_SECONDS
