"""Sanitising of texts with caller input, for logs, terminals and response headers.

A session's name, for example, may contain line breaks that forge log lines, terminal escapes, or a megabyte.
"""

from __future__ import annotations

import logging

MAX_TEXT_BYTES = 2400  # of a percent-encoded header; gRPC clients accept 8 KB for all headers
MAX_LOG_CHARACTERS = 4096  # of a log message
MAX_TRACE_LINES = 120
INDENT = "    | "  # prefix of continuation lines, with which no record begins


def bounded(text: str, most_bytes: int = MAX_TEXT_BYTES) -> str:
    """Cut a text to `most_bytes` as a percent-encoded header, in which most bytes take three."""
    room = most_bytes
    for index, character in enumerate(text[: most_bytes + 1]):
        room -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode("utf-8", "replace"))
        if room < 0:
            return f"{text[:index]}... ({len(text)} characters)"
    return text


def on_one_line(text: str) -> str:
    """Escape control characters and line breaks as in Python literals."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


class LineFormatter(logging.Formatter):
    """Formats each record as one line, followed by the lines of its traceback with a prefix."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's line, limited to `MAX_LOG_CHARACTERS`, and at most `MAX_TRACE_LINES` lines of traceback."""
        line = on_one_line(self._formatted(record))
        return "\n".join([line, *(INDENT + on_one_line(each) for each in self.trace_lines(record))])

    def trace_lines(self, record: logging.LogRecord) -> list[str]:
        """The last `MAX_TRACE_LINES` lines of the traceback and stack, each cut to a limited length."""
        traces = [self.formatException(record.exc_info)] if record.exc_info else []
        traces += [record.stack_info] if record.stack_info else []
        return [cut(each) for trace in traces for each in trace.splitlines()][-MAX_TRACE_LINES:]

    def _formatted(self, record: logging.LogRecord) -> str:
        record.message = cut(record.getMessage())
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        return self.formatMessage(record)


def cut(text: str) -> str:
    """Cut a text to `MAX_LOG_CHARACTERS`."""
    return text if len(text) <= MAX_LOG_CHARACTERS else f"{text[:MAX_LOG_CHARACTERS]}... ({len(text)} characters)"
