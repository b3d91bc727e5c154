"""Signals to a program that starts others, or that fetches."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from bough.processes.signals import ended_by_ctrl_c, stop_signals
from tests.fakes.waiting import until


@pytest.fixture
def hangup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup inherit that it is ignored
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
async def test_a_closed_terminal_cancels_like_sigterm() -> None:
    """Otherwise its processes would be left to the kernel, and their folder for good."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with stop_signals(), pytest.raises(asyncio.CancelledError):
            await asyncio.gather(asyncio.to_thread(os.kill, os.getpid(), number), asyncio.sleep(60))
        task.uncancel()


@pytest.mark.usefixtures("hangup")
async def test_a_program_ended_by_a_signal_has_the_status_that_shells_give_it() -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        with pytest.raises(SystemExit, match=str(128 + number)), stop_signals():
            await asyncio.gather(asyncio.to_thread(os.kill, os.getpid(), number), asyncio.sleep(60))
        task.uncancel()


async def stopped_twice() -> None:
    with stop_signals() as stop:
        await asyncio.gather(stop.wait(), asyncio.to_thread(os.kill, os.getpid(), signal.SIGTERM))
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: stop.is_repeated)


async def test_an_awaited_signal_lets_the_block_end_itself_and_the_second_sets_a_status() -> None:
    with stop_signals() as stop:
        await asyncio.gather(stop.wait(), asyncio.to_thread(os.kill, os.getpid(), signal.SIGTERM))
        assert (stop.number, stop.is_repeated) == (signal.SIGTERM, False)
    with pytest.raises(SystemExit, match="130"):
        await stopped_twice()


@pytest.mark.usefixtures("hangup")
async def test_under_nohup_a_program_continues() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_signals():
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0.01)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_ctrl_c_ends_a_download_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library waits for the threads that download, and asyncio's handler for the next await."""
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    before = signal.getsignal(signal.SIGINT)
    with ended_by_ctrl_c():
        signal.raise_signal(signal.SIGINT)
    assert exits == [130]
    assert signal.getsignal(signal.SIGINT) == before
