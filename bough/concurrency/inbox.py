"""Commands for a thread that alone may touch what they act on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any

from bough.concurrency.futures import settle
from bough.errors import Unavailable


class Inbox:
    """A queue of commands, put by any thread and run by one. Those that come after its end are refused."""

    def __init__(self, refusal: str) -> None:
        """`refusal` is the text of the Unavailable that later commands get."""
        self._refusal = refusal
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_over = False

    def put(self, command: Callable[[], None] | None) -> None:
        """Queue a command that must not fail; None ends the thread."""
        self._commands.put(command)

    def post(self, future: Future[Any], act: Callable[[], None]) -> None:
        """Queue `act`, which runs in the caller's context, for logs and traces; its errors go to the future."""
        context = copy_context()

        def run() -> None:
            try:
                if self._is_over:
                    raise Unavailable(self._refusal)
                context.run(act)
            except Exception as exc:
                settle(future, exc)

        self._commands.put(run)
        if self._is_over:
            self._refuse()

    def run(self, wait_seconds: Callable[[], float | None]) -> bool:
        """Run queued commands, on the thread; returns False if it is to end.

        `wait_seconds` is asked before each how long to wait for it: 0 is not at all, None until one comes.
        """
        while True:
            try:
                command = self._commands.get(timeout=wait_seconds())
            except Empty:
                return True
            if command is None:
                return False
            command()

    def end(self) -> None:
        """Refuse what is queued and what is still to come, when the thread ends."""
        self._is_over = True
        self._refuse()

    def _refuse(self) -> None:
        """Run commands that can only fail; any thread, each is taken once."""
        with suppress(Empty):
            while True:
                if (command := self._commands.get_nowait()) is not None:
                    command()
