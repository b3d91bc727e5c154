"""A call on a stack that is deep enough for code which recurses as deeply as its input is nested."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

STACK_BYTES = 512 * 2**20  # of addresses; only what is used takes memory

Result = TypeVar("Result")

_starting = threading.Lock()  # the size of stacks is the process's


def on_deep_stack(work: Callable[[], Result]) -> Result:
    """Call `work` on a thread of its own with a stack of STACK_BYTES, and return or raise what it does."""
    with ThreadPoolExecutor(1, "deep-stack") as threads:
        with _starting:
            usual = threading.stack_size(STACK_BYTES)
            try:
                future = threads.submit(work)  # starts the thread
            finally:
                threading.stack_size(usual)
        return future.result()
