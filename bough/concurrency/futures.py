"""Futures whose caller may cancel them at any moment."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Lock
from typing import Any, TypeVar

from bough.errors import Exhausted

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
