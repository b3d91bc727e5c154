"""Standard output whose reader may leave before its end, as in `bough doctor | head`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_PIPE = 128 + signal.SIGPIPE  # as a shell has it of a command that the signal ends; Python ignores the signal


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Ends the process without a word where nobody reads what is written in the block."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, and not at the interpreter's end, where an error of it would be told
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what could not be written
        raise SystemExit(EXIT_PIPE) from None
