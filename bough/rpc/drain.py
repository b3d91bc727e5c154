"""Who may still come in: a server that takes its leave lets nothing new in, and knows what is inside.

Calls that are no work (health, what a process says of itself, release) are answered to the end.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from bough.errors import Unavailable

POLL_SECONDS = 0.05
BETWEEN_CALLS_SECONDS = 5.0  # a session that has not called for so long is not in the middle of a request
ENDING_SECONDS = 5.0  # that a call which is cut off takes at most to free what it holds


class Drainer:
    """Counts the calls that are work, and can be shut."""

    def __init__(self, *work: str) -> None:
        """`work` are names of methods, such as "Generate"."""
        self._work = frozenset(work)
        self._inside: set[asyncio.Task[Any]] = set()
        self._cut: set[asyncio.Task[Any]] = set()
        self._refusal = ""

    @property
    def is_busy(self) -> bool:
        """Whether work is inside."""
        return bool(self._inside)

    def stop_accepting(self, refusal: str) -> None:
        """From now on work is refused as Unavailable with this text, but for what `goes_on`."""
        self._refusal = refusal

    def goes_on(self, request: Any) -> bool:
        """Whether a call belongs to work that is inside already: that is let in to the end."""
        return False

    def entering(self, method: str, num_bytes: int) -> AbstractContextManager[None]:
        """Around one call from before its message of so many bytes is decoded; may raise what refuses it."""
        return nullcontext()

    @contextmanager
    def track(self, method: str, request: Any) -> Iterator[None]:
        """Around one call. Raises Unavailable where it is refused, or was cut off half-way."""
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
            task.uncancel()  # not the caller has left: we are leaving, and owe it a status
            raise Unavailable(f"{self._refusal}; this call was cut off, and can be resumed there") from None
        finally:
            self._inside.discard(task)
            self._cut.discard(task)

    async def wait_idle(self, patience_seconds: float) -> bool:
        """Waits until nothing is inside; False where that took too long."""
        deadline = time.monotonic() + patience_seconds
        while self.is_busy:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def cut(self) -> None:
        """Ends what is inside; returns when it has freed what it held."""
        self._cut = set(self._inside)
        for task in self._cut:
            task.cancel()
        deadline = time.monotonic() + ENDING_SECONDS
        while self._inside and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)


class SessionGate(Drainer):
    """A worker's: a request of a session is many calls, and between two of them it is inside too."""

    def __init__(self, *work: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(*work)
        self._clock = clock
        self._last_calls: OrderedDict[str, float] = OrderedDict()  # by session, oldest first

    @property
    def is_busy(self) -> bool:
        """Whether a call is inside, or a session is likely to call again."""
        self._forget_old()
        return bool(self._inside or self._last_calls)

    def goes_on(self, request: Any) -> bool:
        """Sessions in the middle of a request are let in; whatever comes anew is not."""
        self._forget_old()
        return request.context.session_id in self._last_calls

    @contextmanager
    def track(self, method: str, request: Any) -> Iterator[None]:
        """As for any gate; a session that is released is not waited for."""
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
