"""Processor time of processes: time running, and time ready to run but waiting for a core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

NANO = 1e-9


class ProcessorUse(NamedTuple):
    """Seconds since a process's start, summed over its present threads."""

    ran: float
    waited: float  # ready to run, waiting for a core

    def __sub__(self, earlier: ProcessorUse) -> ProcessorUse:
        return ProcessorUse(self.ran - earlier.ran, self.waited - earlier.waited)


def processor_use(process_id: int) -> ProcessorUse:
    """The processor time of a running process, without that of threads that have ended."""
    return ProcessorUse(*(NANO * sum(column) for column in zip(*_threads(process_id), strict=True)))


def _threads(process_id: int) -> Iterator[tuple[int, int]]:
    for task in Path(f"/proc/{process_id}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            ran, waited, _ = (task / "schedstat").read_text().split()
            yield int(ran), int(waited)
