"""Futures that callers may cancel at any moment, and commands for a thread that answer with them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, TypeVar

from bough.errors import Exhausted, Unavailable

Result = TypeVar("Result")


def settle(future: Future[Result], outcome: Result | Exception) -> None:
    """Set the result or exception of a future unless it was cancelled; call it once for each future."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class PendingCalls:
    """A bounded count of unanswered calls; thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = Lock()
        self._num = 0
        self._waiting_for_none: list[Future[None]] = []

    def __len__(self) -> int:
        """The number of unanswered calls."""
        return self._num

    def add(self, future: Future[Any]) -> None:
        """Count a call until its future is done.

        Raises:
            Exhausted: the limit is reached.
        """
        with self._lock:
            if self._num >= self._most:
                raise Exhausted(f"{self._num} calls are waiting already; try again, or use a larger --max-waiting")
            self._num += 1
        future.add_done_callback(lambda _: self._answered())

    def when_idle(self) -> Future[None]:
        """A future that is done as soon as no call is unanswered."""
        future: Future[None] = Future()
        with self._lock:
            is_now = self._num == 0
            if not is_now:
                self._waiting_for_none.append(future)
        if is_now:
            settle(future, None)
        return future

    def _answered(self) -> None:
        with self._lock:
            self._num -= 1
            waiting = []
            if self._num == 0:
                waiting, self._waiting_for_none = self._waiting_for_none, []
        for future in waiting:
            settle(future, None)


class Inbox:
    """A queue of commands from any thread, run by one thread. Commands after its end are refused."""

    def __init__(self, refusal: str) -> None:
        """`refusal` is the text of the Unavailable that later commands get."""
        self._refusal = refusal
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_over = False

    def put(self, command: Callable[[], None] | None) -> None:
        """Queue a command that must not fail; None ends the thread."""
        self._commands.put(command)

    def post(self, future: Future[Any], act: Callable[[], None]) -> None:
        """Queue `act`. It runs in the caller's context, for logs and traces; its errors are set on the future."""
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
        """Run queued commands, on the thread; returns False if the thread should end.

        `wait_seconds` returns, before each command, how long to wait for it: 0 is not at all, None until one comes.
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
        """Refuse queued and later commands, when the thread ends."""
        self._is_over = True
        self._refuse()

    def _refuse(self) -> None:
        """Run commands that can only fail. May be called on any thread; each command runs once."""
        with suppress(Empty):
            while True:
                if (command := self._commands.get_nowait()) is not None:
                    command()
