"""Sanitising of texts with caller input, for logs, terminals and response headers.

A session's name, for example, may contain line breaks that forge log lines, terminal escapes, or a megabyte.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable
from typing import TextIO

MAX_TEXT_BYTES = 2400  # of a percent-encoded header; gRPC clients accept 8 KB for all headers
MAX_LOG_CHARACTERS = 4096  # of a log message
MAX_TRACE_LINES = 120
MAX_LINES_A_MINUTE, MINUTE_SECONDS = 60, 60.0  # from one place in the code, if strangers can cause these lines
INDENT = "    | "  # prefix of continuation lines, with which no record begins
# Control characters but tab and line break, and those that turn the order of characters around. The group is a carriage
# return that a line break follows, or may follow in the next piece of a text.
_STEERING = re.compile(r"(\r(?=\n|\Z))|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


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
    return "".join(character if character.isprintable() else _escaped(character) for character in text)


def say(*lines: str, file: TextIO | None = None) -> None:
    """Print lines, by default on standard output. Names and texts of others in them cannot add lines."""
    print("\n".join(on_one_line(cut(line)) for line in lines), file=file, flush=True)


def quoted_lines(text: str) -> list[str]:
    """The lines of a text that may quote a log or a traceback: those after the first have a prefix."""
    first, *others = text.split("\n")
    return [first, *(INDENT + line for line in others)]


def say_error(error: object) -> None:
    """Print an error on standard error; further lines of its text have a prefix."""
    say(*quoted_lines(f"error: {error}"), file=sys.stderr)


def report(text: str) -> None:
    """Print lines on standard error, on a new line if text is being printed."""
    sys.stdout.flush()
    begin = [""] if sys.stdout.isatty() and sys.stderr.isatty() else []
    say(*begin, *text.split("\n"), file=sys.stderr)


def shown(text: str, stream: TextIO) -> str:
    """A model's text for a stream. On a terminal control characters are escaped, and Windows' line ends converted."""
    if not stream.isatty():
        return text
    return _STEERING.sub(lambda found: "" if found[1] else _escaped(found[0]), text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


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


class SparingFilter(logging.Filter):
    """Limits the lines of loggers that strangers can trigger, as they could fill a disk.

    Each place in the code may log MAX_LINES_A_MINUTE; its next line then has the number of dropped ones.
    """

    def __init__(self, names: tuple[str, ...], clock: Callable[[], float] = time.monotonic) -> None:
        """`names` are the loggers; `clock` is in seconds."""
        super().__init__()
        self._names, self._clock = names, clock
        self._minutes: dict[tuple[str, int], tuple[float, int]] = {}  # by place: when its minute began, lines in it

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is to be logged."""
        if record.name not in self._names:
            return True
        place, now = (record.pathname, record.lineno), self._clock()
        began, num_lines = self._minutes.get(place, (now, 0))
        if now - began >= MINUTE_SECONDS:
            if num_lines > MAX_LINES_A_MINUTE:
                left_out = num_lines - MAX_LINES_A_MINUTE
                record.msg, record.args = f"{record.getMessage()} ({left_out} such lines before were left out)", None
            began, num_lines = now, 0
        self._minutes[place] = began, num_lines + 1
        return num_lines < MAX_LINES_A_MINUTE
