"""Handling of a closed pipe at standard output, as in `bough doctor | head`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_PIPE = 128 + signal.SIGPIPE  # the shell's status for SIGPIPE, which Python ignores


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Exit silently if the reader of standard output has closed the pipe."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # at exit, the interpreter would print the error
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards unwritten output
        raise SystemExit(EXIT_PIPE) from None
