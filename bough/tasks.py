"""Tasks that go on until somebody ends them."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_SECONDS = 1.0  # after which a task that was cancelled and is still there is cancelled again


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks until they have ended, whatever they end with.

    Once is not always enough: a library whose time-out passes in that moment may take the cancellation for its own and
    raise an error instead, and a task that outlives errors goes on.
    """
    while going_on := [task for task in tasks if not task.done()]:
        for task in going_on:
            task.cancel()
        await asyncio.wait(going_on, timeout=AGAIN_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)
