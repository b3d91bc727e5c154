"""Signal handling of a program that must end its children first; without effect outside the main thread."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cancelled_by_sigterm() -> Iterator[None]:
    """While the block runs, SIGTERM cancels its task."""
    if not _may_handle_signals():
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM while the block runs, so that repeated signals cannot interrupt a cleanup."""
    if not _may_handle_signals():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _may_handle_signals() -> bool:
    return threading.current_thread() is threading.main_thread()
