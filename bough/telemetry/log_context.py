"""What a line of a log is about: the request, the session and the trace that the running task or thread works for."""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple


class LogContext(NamedTuple):
    """Names that a line carries, each empty where it is not known."""

    request_id: str = ""
    session_id: str = ""
    http_request_id: str = ""  # by which an HTTP client knows its request: the answer's `x-request-id`
    trace_id: str = ""

    def known(self) -> dict[str, str]:
        """Those that are not empty, by name."""
        return {name: value for name, value in self._asdict().items() if value}


NOTHING = LogContext()
_context: ContextVar[LogContext] = ContextVar("log_context", default=NOTHING)


def log_context() -> LogContext:
    """Of the running task."""
    return _context.get()


def set_log_context(context: LogContext) -> None:
    """Whatever the running task, and those that it starts, log from now on carries these names.

    A task works for one request and ends with it, so nobody has to take this back.
    """
    _context.set(context)


def log_session(session_id: str) -> None:
    """The session of what the running task logs from now on is known."""
    _context.set(_context.get()._replace(session_id=session_id))
