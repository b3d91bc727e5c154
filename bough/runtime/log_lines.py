"""Texts that callers have a part in, made fit to be told: in a log, on a terminal, in a header of an answer.

A name of a session may hold line breaks, and so a line of a log that nobody has written; or the colours of a terminal;
or a megabyte.
"""

from __future__ import annotations

import logging

MAX_TEXT_BYTES = 2400  # of a text as a header carries it; clients of gRPC take eight thousand for all of them
MAX_LOG_CHARACTERS = 4096  # of a message in a log
MAX_TRACE_LINES = 120
INDENT = "    | "  # of lines below the first, which no line of its own begins with


def bounded(text: str, most_bytes: int = MAX_TEXT_BYTES) -> str:
    """A text, cut where it would be longer than a header of HTTP/2 has room for: most bytes take three there."""
    room = most_bytes
    for index, character in enumerate(text[: most_bytes + 1]):
        room -= 1 if " " <= character <= "~" else 3 * len(character.encode("utf-8", "replace"))
        if room < 0:
            return f"{text[:index]}... ({len(text)} characters)"
    return text


def on_one_line(text: str) -> str:
    """A text whose control characters, line breaks and the like are spelled as Python spells them."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


class LineFormatter(logging.Formatter):
    """A line for each record; the trace of an exception follows it, in lines that begin as no record does."""

    def format(self, record: logging.LogRecord) -> str:
        """Of at most `MAX_LOG_CHARACTERS`, and a trace of so many lines."""
        line = on_one_line(self._told(record))
        return "\n".join([line, *(INDENT + on_one_line(each) for each in self.trace_lines(record))])

    def trace_lines(self, record: logging.LogRecord) -> list[str]:
        """Of what is logged beside an exception: the last ones, where they are too many, and each with an end."""
        traces = [self.formatException(record.exc_info)] if record.exc_info else []
        traces += [record.stack_info] if record.stack_info else []
        return [cut(each) for trace in traces for each in trace.splitlines()][-MAX_TRACE_LINES:]

    def _told(self, record: logging.LogRecord) -> str:
        record.message = cut(record.getMessage())
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        return self.formatMessage(record)


def cut(text: str) -> str:
    """A text, without what goes beyond `MAX_LOG_CHARACTERS`."""
    return text if len(text) <= MAX_LOG_CHARACTERS else f"{text[:MAX_LOG_CHARACTERS]}... ({len(text)} characters)"
