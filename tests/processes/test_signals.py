"""Signals to a program that starts others, or that fetches."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from bough.processes.signals import cancelled_by_signals, ended_by_ctrl_c


@pytest.fixture
def hangup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup inherit that it is ignored
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
async def test_a_terminal_that_is_closed_cancels_as_sigterm_does() -> None:
    """Otherwise its processes would be left to the kernel, and their folder for good."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        with cancelled_by_signals(), pytest.raises(asyncio.CancelledError):
            await asyncio.gather(asyncio.to_thread(os.kill, os.getpid(), number), asyncio.sleep(60))
        task.uncancel()


@pytest.mark.usefixtures("hangup")
async def test_under_nohup_it_goes_on() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with cancelled_by_signals():
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
