"""Tasks that go on until somebody ends them."""

from __future__ import annotations

import asyncio

import pytest

from bough import tasks


async def test_a_task_that_survives_a_cancellation_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a heartbeat did for ever, whose call to the index timed out in the moment of the cancellation."""
    monkeypatch.setattr(tasks, "AGAIN_SECONDS", 0.01)
    cancellations = 0

    async def survive() -> None:
        nonlocal cancellations
        while cancellations < 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancellations += 1
        await asyncio.sleep(60)

    stubborn, docile = asyncio.create_task(survive()), asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await tasks.end(stubborn, docile)
    assert stubborn.cancelled()
    assert docile.cancelled()
    assert cancellations == 2


async def test_what_a_task_failed_with_is_not_raised() -> None:
    """Whoever ends it wants it gone."""

    async def fail() -> None:
        raise ValueError("on its own")

    failed = asyncio.create_task(fail())
    await asyncio.sleep(0)
    await tasks.end(failed)
    assert isinstance(failed.exception(), ValueError)
