"""Progress messages of commands that start processes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TextIO

from bough.processes.launch import PendingProcesses
from bough.runtime.log_lines import on_one_line

QUIET_SECONDS = 5.0  # between messages, if the output is not a terminal
ERASE_LINE = "\r\x1b[K"


class Progress:
    """Shows what a start waits for: one changing line on a terminal, elsewhere a line every few seconds."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Prints to standard error by default."""
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._printed_seconds = 0.0  # of the latest message, since the start

    def __call__(self, waiting: PendingProcesses) -> None:
        """Print what is waited for."""
        text = on_one_line(f"waiting {waiting.seconds:.0f} s for {', '.join(waiting.names)}")
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1  # a line that wraps could not be erased
            print(f"{ERASE_LINE}{text[:width]}", end="", file=self._stream, flush=True)
        elif waiting.seconds - self._printed_seconds >= QUIET_SECONDS:
            print(text, file=self._stream, flush=True)
            self._printed_seconds = waiting.seconds

    def clear(self) -> None:
        """Erase the line from a terminal."""
        if self._is_terminal:
            print(ERASE_LINE, end="", file=self._stream, flush=True)


def activation() -> str:
    """How a terminal comes to find the commands `bough` and `python` that are shown to a user; empty if it does."""
    script = Path(sys.executable).with_name("activate")
    python = str(script.with_name("python"))  # while pip's scripts are run by python3
    is_found = not script.exists() or shutil.which("python") == python
    return "" if is_found else f" (after `source {script}`)"
