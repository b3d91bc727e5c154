"""Ids that log lines carry: of the request, session and trace that the running task or thread works for."""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple


class LogContext(NamedTuple):
    """Ids of a log line; empty if unknown."""

    request_id: str = ""
    session_id: str = ""
    http_request_id: str = ""  # the `x-request-id` of an HTTP answer
    trace_id: str = ""

    def known(self) -> dict[str, str]:
        """The ids that are not empty, by name."""
        return {name: value for name, value in self._asdict().items() if value}


NOTHING = LogContext()
# Of the running task and tasks that it starts. A task works for one request and ends with it: it need not be undone.
LOG_CONTEXT: ContextVar[LogContext] = ContextVar("log_context", default=NOTHING)


def log_session(session_id: str) -> None:
    """Set the session id in the running task's log context."""
    LOG_CONTEXT.set(LOG_CONTEXT.get()._replace(session_id=session_id))
