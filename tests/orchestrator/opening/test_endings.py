"""What ends while it is waited for: streams that are aborted and cancelled at once, and channels that are closed."""

from __future__ import annotations

import asyncio

import pytest

from bough.errors import Unavailable
from orchestrator.admission.active_streams import Stream
from orchestrator.cluster.worker_clients import TargetClient


@pytest.mark.parametrize("num_ticks", range(6))
async def test_a_cancellation_beside_an_abort_is_not_swallowed(num_ticks: int) -> None:
    """A stop button sends Abort and closes the connection: the handler must end, or it waits for a reader for ever."""
    stream = Stream("r", "")

    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            for _ in range(3):
                await asyncio.sleep(0)

    async def handler() -> None:
        await stream.before_end(slow_to_end())
        await asyncio.sleep(60)  # what a handler does next, for a reader that has gone

    task = asyncio.create_task(handler())
    await asyncio.sleep(0)
    stream.end()
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(5):
        await asyncio.wait({task})
    assert task.cancelled()


async def test_a_channel_that_was_closed_is_a_worker_that_does_not_answer() -> None:
    """A request may wait for a target that is forgotten meanwhile: it must go to another, not end as a bug of ours."""
    client = TargetClient("127.0.0.1:9", "t")
    await client.close()
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9: the connection was closed"):
        await client.info()
