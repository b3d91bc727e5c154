"""Log formats, text lines or one JSON object per line, and ids that log lines carry."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import quote

from bough.config.processes import ServiceConfig
from bough.errors import ConfigError
from bough.protocol.ids import ScopedId
from bough.runtime.log_lines import LineFormatter, SparingFilter, cut

QUIET = ("httpx", "numba", "asyncio")  # loggers of libraries that log only from WARNING on
# Loggers that clients reach before they are asked for a key.
ABOUT_CLIENTS = ("uvicorn.error", "bough.security.tls", "bough.telemetry.metrics")


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
# Of the running task and the tasks that it starts. A task serves one request and ends with it: no reset is needed.
LOG_CONTEXT: ContextVar[LogContext] = ContextVar("log_context", default=NOTHING)


def log_session(session_id: ScopedId) -> None:
    """Set the session id in the running task's log context."""
    LOG_CONTEXT.set(LOG_CONTEXT.get()._replace(session_id=str(session_id)))


def configure_logging(config: ServiceConfig) -> None:
    """Log to standard error. Raises ConfigError for an unknown level."""
    if config.log_level not in logging.getLevelNamesMapping():
        raise ConfigError(f"--log-level: must be DEBUG, INFO, WARNING or ERROR, got {config.log_level!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    handler.addFilter(SparingFilter(ABOUT_CLIENTS))
    logging.basicConfig(level=config.log_level, handlers=[handler])
    for name in QUIET:
        logging.getLogger(name).setLevel("WARNING")


class TextFormatter(LineFormatter):
    """Text format: time, level, logger and message, followed by ids: ` [request_id=r1 session_id=s1]`.

    `bough.processes.child` parses such lines.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The first line, before any traceback. Client-chosen ids are escaped so that they cannot forge log lines."""
        names = " ".join(f"{name}={quote(value, safe=SAFE)}" for name, value in LOG_CONTEXT.get().known().items())
        line = super().formatMessage(record)
        return f"{line} [{names}]" if names else line


SAFE = "!#$&'()*+,-./:;<>?@^_`{|}~"  # not escaped in ids: printable characters except those that end an id


class JsonFormatter(LineFormatter):
    """JSON format: an object with time (UTC), level, logger and message, and known ids such as `request_id`."""

    def format(self, record: logging.LogRecord) -> str:
        """The JSON line, for any message."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": cut(record.getMessage()),
        } | LOG_CONTEXT.get().known()
        if trace := self.trace_lines(record):
            line["exception"] = "\n".join(trace)
        text = json.dumps(line, ensure_ascii=False)
        return text if text.isprintable() else json.dumps(line)
