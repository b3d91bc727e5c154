"""Signal handling of a program that must end its children first; without effect outside the main thread."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from bough.runtime.exit_status import EXIT_SIGNAL

STOPPING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class StopSignals:
    """The number of stop signals since `stop_signals` began, and the latest one."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None  # the latest
        self.is_repeated = False
        self._task = asyncio.current_task()
        self._first, self._is_awaited = asyncio.Event(), False

    async def wait(self) -> None:
        """Return at the first signal, which then does not cancel the block."""
        self._is_awaited = True
        await self._first.wait()

    def arrived(self, number: signal.Signals) -> None:
        """Record a signal; the first one cancels the block unless a caller awaits it."""
        self.number, self.is_repeated = number, self.number is not None
        self._first.set()
        if not self.is_repeated and not self._is_awaited:
            assert self._task is not None, "a coroutine runs in a task"
            self._task.cancel()


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """While the block runs, SIGINT, SIGTERM and the SIGHUP of a closed terminal (except under nohup) cancel its task.

    SIGINT counts even if the process inherited it as ignored, as a script's `command &` does.

    Raises:
        SystemExit: a signal cancelled the block, or came a second time; its status is the one that shells use.
    """
    loop, stop = asyncio.get_running_loop(), StopSignals()
    is_under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    wanted = [number for number in STOPPING if number != signal.SIGHUP or not is_under_nohup]
    numbers = wanted if _may_handle_signals() else []
    for number in numbers:
        loop.add_signal_handler(number, stop.arrived, number)
    try:
        yield stop
    except asyncio.CancelledError:
        if stop.number is not None:
            raise SystemExit(EXIT_SIGNAL + stop.number) from None
        raise
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
    if stop.is_repeated and stop.number is not None:
        raise SystemExit(EXIT_SIGNAL + stop.number)


def ended_by_ctrl_c() -> AbstractContextManager[None]:
    """While the block runs, SIGINT ends the process at once, even if a library's threads still download.

    asyncio's own handler would wait until a command awaits.
    """
    return _handled(lambda *_: os._exit(EXIT_SIGNAL + signal.SIGINT), signal.SIGINT)


def signals_ignored() -> AbstractContextManager[None]:
    """Ignore SIGINT, SIGTERM and SIGHUP while the block runs, so that repeated signals cannot interrupt a cleanup."""
    return _handled(signal.SIG_IGN, *STOPPING)


@contextmanager
def _handled(handler: Callable[..., Any] | signal.Handlers, *numbers: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers} if _may_handle_signals() else {}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def _may_handle_signals() -> bool:
    return threading.current_thread() is threading.main_thread()
