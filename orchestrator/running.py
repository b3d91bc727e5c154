"""What is being served: at most one stream for each request and for each session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from bough.errors import BoughError, InvalidRequest, NotFound, StaleEpoch

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class Stream:
    """A request from its arrival to the end of its stream."""

    request_id: str
    session_id: str  # empty where the client has not named one
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # from outside
    error: BoughError | None = None  # that it ended with; None is an abort

    def end(self, error: BoughError | None = None) -> None:
        """Ends it before its time."""
        self.error = self.error or error
        self.ended.set()

    @property
    def is_superseded(self) -> bool:
        """Whether its session is somebody else's now."""
        return self.error is not None

    async def before_end(self, work: Awaitable[Result]) -> Result | None:
        """What it comes to; None where the stream is aborted first, which ends the work. Raises what else ends it."""
        task, end = asyncio.ensure_future(work), asyncio.ensure_future(self.ended.wait())
        try:
            await asyncio.wait((task, end), return_when=asyncio.FIRST_COMPLETED)
            if self.error is not None:
                raise self.error
            return task.result() if task.done() else None
        finally:
            end.cancel()
            if not task.done():
                task.cancel()
            with suppress(asyncio.CancelledError, BoughError):
                await task


class Running:
    """The streams of this orchestrator."""

    def __init__(self) -> None:
        self._by_request: dict[str, Stream] = {}
        self._by_session: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    @contextmanager
    def admitted(self, request_id: str, session_id: str, takes_over: bool) -> Iterator[Stream]:
        """A stream for as long as the block runs. One that `takes_over` ends an earlier stream of the same request.

        Raises:
            InvalidRequest: the request, or another one in the session, is running.
        """
        self._refuse_or_end(request_id, session_id, takes_over)
        stream = Stream(request_id, session_id)
        self._by_request[request_id] = stream
        if session_id:
            self._by_session[session_id] = stream
        try:
            yield stream
        finally:
            for table, name in ((self._by_request, request_id), (self._by_session, session_id)):
                if table.get(name) is stream:
                    del table[name]

    def request(self, request_id: str) -> Stream:
        """Raises NotFound."""
        if request_id not in self._by_request:
            raise NotFound(f"request_id: {request_id!r} is not running")
        return self._by_request[request_id]

    def in_session(self, session_id: str) -> Stream | None:
        """What runs in a session."""
        return self._by_session.get(session_id)

    def _refuse_or_end(self, request_id: str, session_id: str, takes_over: bool) -> None:
        same, neighbour = self._by_request.get(request_id), self._by_session.get(session_id)
        if neighbour is not None and not (takes_over and neighbour is same):
            raise InvalidRequest(f"session_id: {session_id!r} has a request running; wait for its end")
        if same is None:
            return
        if not takes_over:
            raise InvalidRequest(f"request_id: {request_id!r} is already running; another would do")
        same.end(StaleEpoch(f"request_id: {request_id!r} has been resumed by another call"))
