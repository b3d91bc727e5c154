"""Signal handling of a program that must end its children first; without effect outside the main thread."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

EXIT_INTERRUPTED = 130  # as of a shell
STOPPING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """While the block runs, SIGTERM cancels its task, and, except under nohup, SIGHUP of a terminal that is closed."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    is_under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    wanted = (signal.SIGTERM,) if is_under_nohup else (signal.SIGTERM, signal.SIGHUP)
    numbers = wanted if _may_handle_signals() else ()
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def ended_by_ctrl_c() -> AbstractContextManager[None]:
    """While the block runs, SIGINT ends the process at once, whatever threads of a library, as of a download, still do.

    asyncio's own handler would wait until a command awaits.
    """
    return _handled(lambda *_: os._exit(EXIT_INTERRUPTED), signal.SIGINT)


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
