"""How a process writes its log: lines for people, or one JSON object a line for whatever collects them."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from urllib.parse import quote

from bough.config.processes import ServiceConfig
from bough.errors import ConfigError
from bough.runtime.log_lines import LineFormatter, cut
from bough.telemetry.log_context import log_context

QUIET = ("httpx", "numba", "asyncio")  # whose lines below WARNING say nothing of bough


def configure_logging(config: ServiceConfig) -> None:
    """Logs to standard error from now on. Raises ConfigError for a level that is none."""
    if config.log_level not in logging.getLevelNamesMapping():
        raise ConfigError(f"--log-level: value was {config.log_level!r}; must be DEBUG, INFO, WARNING or ERROR")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    logging.basicConfig(level=config.log_level, handlers=[handler])
    for name in QUIET:
        logging.getLogger(name).setLevel("WARNING")


class TextFormatter(LineFormatter):
    """Time, level, logger and message, and after them what the line is about: ` [request_id=r1 session_id=s1]`.

    `bough.processes.child` finds the message in such a line again.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The first line; a traceback comes after it. Names are a client's, and may not look like lines of a log."""
        names = " ".join(f"{name}={quote(value, safe=SAFE)}" for name, value in log_context().known().items())
        line = super().formatMessage(record)
        return f"{line} [{names}]" if names else line


SAFE = "!#$&'()*+,-./:;<>?@^_`{|}~"  # in a name in a line of text: what is printed, but for what ends the name


class JsonFormatter(LineFormatter):
    """One object a line: time (UTC), level, logger and message, then `request_id` and others that are known."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, whatever is in the message."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": cut(record.getMessage()),
        } | log_context().known()
        if trace := self.trace_lines(record):
            line["exception"] = "\n".join(trace)
        text = json.dumps(line, ensure_ascii=False)
        return text if text.isprintable() else json.dumps(line)
