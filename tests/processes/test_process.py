"""A process that is ended before it has started."""

from __future__ import annotations

import asyncio

import pytest

from bough.errors import Unavailable
from bough.processes.process import exit_if_stopped


class Left(Exception):
    """The process would have ended."""


@pytest.fixture(autouse=True)
def _stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(status: int) -> None:
        raise Left(status)

    monkeypatch.setattr("bough.processes.process.os._exit", leave)


async def test_an_interrupted_step_of_the_start_is_not_finished() -> None:
    """One that loads, or waits for an index that ends with it, would outlive its parent."""
    stop, endless = asyncio.Event(), asyncio.Event()
    starting = asyncio.create_task(exit_if_stopped(stop, endless.wait()))
    await asyncio.sleep(0)
    stop.set()
    with pytest.raises(Left, match="0"):
        await asyncio.wait_for(starting, 60)


async def test_a_step_that_is_not_interrupted_returns_its_result_or_error() -> None:
    async def fails() -> None:
        raise Unavailable("no index")

    stop = asyncio.Event()
    assert await exit_if_stopped(stop, asyncio.to_thread(lambda: 7)) == 7
    with pytest.raises(Unavailable, match="no index"):
        await exit_if_stopped(stop, fails())
    assert len(asyncio.all_tasks()) == 1
