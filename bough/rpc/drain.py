"""Graceful shutdown: tracks calls in flight, and rejects new ones while draining.

Calls that are not work (health, information, release) are always answered.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from bough.concurrency.tasks import came_true
from bough.errors import Unavailable

BETWEEN_CALLS_SECONDS = 5.0  # after this time without a call a session is not in the middle of a request
ENDING_SECONDS = 5.0  # time limit for a cut-off call to free its resources


class Drainer:
    """Tracks calls that are work, and can stop accepting them."""

    def __init__(self, *work: str) -> None:
        """`work` are the names of such methods, for example "Generate"."""
        self._work = frozenset(work)
        self._inside: set[asyncio.Task[Any]] = set()
        self._cut: set[asyncio.Task[Any]] = set()
        self._refusal = ""

    @property
    def is_busy(self) -> bool:
        """Whether work is in flight."""
        return bool(self._inside)

    def stop_accepting(self, refusal: str) -> None:
        """Refuse further work as Unavailable with this text, except calls that `goes_on` accepts."""
        self._refusal = refusal

    def goes_on(self, request: Any) -> bool:
        """Whether a call continues accepted work, and is still accepted while draining."""
        return False

    def entering(self, method: str, num_bytes: int) -> AbstractContextManager[None]:
        """Wraps a call before its message of `num_bytes` is decoded; raises to refuse it."""
        return nullcontext()

    @contextmanager
    def track(self, method: str, request: Any) -> Iterator[None]:
        """Track a call. Raises Unavailable if it is refused, or was cut off."""
        if method not in self._work:
            yield
            return
        if self._refusal and not self.goes_on(request):
            raise Unavailable(self._refusal)
        task = asyncio.current_task()
        assert task is not None, "calls are answered in tasks"
        self._inside.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._cut:
                raise
            task.uncancel()  # cut off by us, not by the caller, which gets a status
            raise Unavailable(f"{self._refusal}; this call was cut off, and can be resumed there") from None
        finally:
            self._inside.discard(task)
            self._cut.discard(task)

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until nothing is in flight; False on timeout."""
        return await came_true(lambda: not self.is_busy, timeout_seconds)

    async def cut(self) -> None:
        """Cancel all calls in flight; returns when they have freed their resources."""
        self._cut = set(self._inside)
        for task in self._cut:
            task.cancel()
        await came_true(lambda: not self._inside, ENDING_SECONDS)


class SessionGate(Drainer):
    """Drainer of a worker: a request is many calls, and also counts as in flight between them."""

    def __init__(self, *work: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(*work)
        self._clock = clock
        self._last_calls: OrderedDict[str, float] = OrderedDict()  # by session id, oldest first

    @property
    def is_busy(self) -> bool:
        """Whether a call is in flight, or a session is likely to call again."""
        self._forget_old()
        return bool(self._inside or self._last_calls)

    def goes_on(self, request: Any) -> bool:
        """Sessions in the middle of a request may continue; new ones may not."""
        self._forget_old()
        return request.context.session_id in self._last_calls

    @contextmanager
    def track(self, method: str, request: Any) -> Iterator[None]:
        """Track a call and its session, for which a drain waits until it is released. Raises Unavailable if refused."""
        with super().track(method, request):
            session_id = request.context.session_id if method in self._work else ""
            self._note(session_id)
            try:
                yield
            finally:
                self._note(session_id)
                if method == "Release":
                    self._last_calls.pop(request.session_id, None)

    def _note(self, session_id: str) -> None:
        if session_id:
            self._last_calls[session_id] = self._clock()
            self._last_calls.move_to_end(session_id)
            self._forget_old()

    def _forget_old(self) -> None:
        oldest = self._clock() - BETWEEN_CALLS_SECONDS
        while self._last_calls and next(iter(self._last_calls.values())) < oldest:
            self._last_calls.popitem(last=False)
