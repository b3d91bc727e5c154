"""Signal handling of a program that must end its children first; without effect outside the main thread."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 130  # as of a shell
STOPPING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """While the block runs, SIGTERM cancels its task, and, except under nohup, SIGHUP of a terminal that is closed."""
    if not _may_handle_signals():
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    is_under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = (signal.SIGTERM,) if is_under_nohup else (signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """While the block runs, SIGINT ends the process at once, whatever threads of a library, as of a download, still do.

    asyncio's own handler would wait until a command awaits.
    """
    if not _may_handle_signals():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore SIGINT, SIGTERM and SIGHUP while the block runs, so that repeated signals cannot interrupt a cleanup."""
    if not _may_handle_signals():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _may_handle_signals() -> bool:
    return threading.current_thread() is threading.main_thread()
