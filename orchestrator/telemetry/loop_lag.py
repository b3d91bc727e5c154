"""How late the event loop comes to what is due, and how many tasks it has.

Whatever blocks it holds up every stream, and shows here; so does what never ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bough.concurrency.tasks import end
from orchestrator.sizing.totals import Tally

PERIOD_SECONDS = 0.02
COUNT_SECONDS = 1.0  # between two counts of tasks
BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class LoopLag:
    """Sleeps for short times while it runs, and notes how much longer each took."""

    def __init__(self) -> None:
        self.tally = Tally(BOUNDS)  # seconds
        self.num_tasks = 0  # of the event loop, as they were counted last

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Measures for as long as the block runs."""
        task = asyncio.create_task(self._measure())
        try:
            yield
        finally:
            await end(task)

    async def _measure(self) -> None:
        next_count = 0.0
        while True:
            began = time.monotonic()
            if began >= next_count:
                self.num_tasks, next_count = len(asyncio.all_tasks()), began + COUNT_SECONDS
            await asyncio.sleep(PERIOD_SECONDS)
            self.tally.add(max(0.0, time.monotonic() - began - PERIOD_SECONDS))
