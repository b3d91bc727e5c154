"""The running streams: at most one for each request and for each session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

from bough.concurrency.tasks import came_true
from bough.errors import AlreadyRunning, BoughError, DeadlineExceeded, NotFound, StaleEpoch
from bough.protocol.ids import ScopedId
from orchestrator.admission.admission import Hold
from orchestrator.sessions.session import Deadline

logger = logging.getLogger(__name__)

ENDING_SECONDS = 5.0  # limit for a stream that was cut off to free its resources

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class Stream:
    """A request from its arrival to the end of its stream."""

    request_id: ScopedId
    session_id: ScopedId  # empty if the client gave none
    hold: Hold = field(default_factory=Hold)  # its place or turn in `Admission`
    deadline: Deadline = field(default_factory=Deadline)
    resources: ExitStack = field(default_factory=ExitStack)  # resources to free at the end
    is_ended: bool = False  # from outside
    error: BoughError | None = None  # the error that it ended with; None is an abort
    is_closed: bool = False  # the session was closed: keep nothing of it
    _limit: asyncio.Timeout | None = None  # of the work under way
    _left: Callable[[ScopedId], None] | None = None  # called with the session's next call
    _successor: ScopedId | None = None  # the session that this call runs; empty if none

    def end(self, error: BoughError | None = None) -> None:
        """End the stream early. With an error, its resources are freed even if its reader never asks again."""
        self.error = self.error or error
        is_first, self.is_ended = not self.is_ended, True
        if self._limit is None:
            if self.error is not None:
                self.free()
        elif is_first and not self._limit.expired():  # else its deadline has just interrupted it
            self._interrupt(self._limit)

    def free(self) -> None:
        """Free the stream's resources, once."""
        self.resources.close()

    def close(self, error: BoughError) -> None:
        """End the stream, as its session was closed."""
        self.is_closed = True
        self.end(error)

    @property
    def is_superseded(self) -> bool:
        """Whether another call has taken over the request or session."""
        return isinstance(self.error, StaleEpoch) and not self.is_closed

    def leave(self, notify: Callable[[ScopedId], None]) -> None:
        """Leave the session to the call that superseded this one; `notify` gets the session that it runs."""
        if self._successor is None:
            self._left = notify
        else:
            notify(self._successor)

    def succeeded_by(self, session_id: ScopedId) -> None:
        """Note which session the superseding call runs; empty if none."""
        self._successor, left, self._left = session_id, self._left, None
        if left is not None:
            left(session_id)

    def supersede(self, earlier: Stream) -> None:
        """End an earlier stream of the same request, whose place this one has taken over."""
        earlier.end(StaleEpoch(f"request_id: {self.request_id.name!r} has been resumed by another call"))

    def takes_over(self, earlier: Stream, session_id: ScopedId) -> None:
        """Report this stream's session to an earlier stream; without one, the superseding call reports its own."""
        if self.is_superseded and not session_id:
            self.leave(earlier.succeeded_by)
        else:
            earlier.succeeded_by(session_id)

    async def before_end(self, work: Awaitable[Result]) -> Result | None:
        """The result of `work`; None if the stream is aborted first, which cancels it.

        The calling task does the work: another task for each round would cost more than the round's tree. Raises the
        stream's error, or DeadlineExceeded.
        """
        result, deadline = None, self.deadline.deadline
        try:
            # The clock of asyncio's own event loops is the monotonic one.
            async with asyncio.timeout_at(deadline if deadline < inf else None) as self._limit:
                if self.is_ended:
                    self._interrupt(self._limit)
                result = await work
        except Exception as exc:
            if not self.is_ended:
                if self._limit is not None and self._limit.expired():
                    raise DeadlineExceeded("deadline: the caller's deadline for this request has passed") from exc
                raise
        finally:
            self._limit = None
        if self.error is not None:
            raise self.error
        return result

    @staticmethod
    def _interrupt(limit: asyncio.Timeout) -> None:
        limit.reschedule(asyncio.get_running_loop().time())


class Running:
    """All running streams of this orchestrator."""

    def __init__(self) -> None:
        self._by_request: dict[ScopedId, Stream] = {}
        self._by_session: dict[ScopedId, Stream] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    @contextmanager
    def admitted(self, stream: Stream, takes_over: bool) -> Iterator[Stream | None]:
        """Register a stream during the block. With `takes_over`, yield an earlier stream of the request, to be ended.

        Raises:
            AlreadyRunning: the request, or another one of the session, is running.
        """
        request_id, session_id = stream.request_id, stream.session_id
        earlier = self._earlier(request_id, session_id, takes_over)
        self._by_request[request_id] = stream
        if session_id:
            self._by_session[session_id] = stream
        try:
            yield earlier
        finally:
            for table, name in ((self._by_request, request_id), (self._by_session, session_id)):
                if table.get(name) is stream:
                    del table[name]

    def request(self, request_id: ScopedId) -> Stream:
        """The stream of a request. Raises NotFound."""
        if request_id not in self._by_request:
            raise NotFound("request_id", f"{request_id.name!r} is not running")
        return self._by_request[request_id]

    def in_session(self, session_id: ScopedId) -> Stream | None:
        """The stream of a session, if one is running."""
        return self._by_session.get(session_id)

    async def finished_or_cut_off(self, timeout_seconds: float, error: BoughError) -> None:
        """Wait until all streams have finished; after `timeout_seconds` end the others with this error."""
        if await came_true(lambda: not self._by_request, timeout_seconds):
            return
        logger.warning("%d requests did not finish in %g s and are cut off", len(self), timeout_seconds)
        for stream in [*self._by_request.values()]:
            stream.end(error)
        await came_true(lambda: not self._by_request, ENDING_SECONDS)

    def _earlier(self, request_id: ScopedId, session_id: ScopedId, takes_over: bool) -> Stream | None:
        same, neighbour = self._by_request.get(request_id), self._by_session.get(session_id)
        if neighbour is not None and not (takes_over and neighbour is same):
            raise AlreadyRunning("session_id", f"{session_id.name!r} has a request running; wait for its end")
        if same is None:
            return None
        if not takes_over:
            wanted = "give this request another one, or wait"
            raise AlreadyRunning("request_id", f"{request_id.name!r} is running; {wanted}")
        return same
