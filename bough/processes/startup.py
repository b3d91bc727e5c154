"""Stages of a process's start, logged as they begin, with their durations once the process is ready."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)

IMPORTS = "imports"  # the stage from the start of the process to the first named stage


class Stages:
    """The consecutive stages of one start."""

    def __init__(self, age_seconds: float) -> None:
        """`age_seconds` is the time since the process was started."""
        self._seconds: dict[str, float] = {}
        self._began = time.monotonic() - age_seconds
        self._name, self._since = IMPORTS, self._began

    def enter(self, name: str) -> None:
        """Begin the next stage, named by a participle such as "reading weights"."""
        self._end()
        self._name = name
        logger.info("%s", name)

    def finish(self) -> None:
        """End the last stage and log the seconds of each."""
        self._end()
        total = self._since - self._began
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self._seconds.items())
        logger.info("ready after %.2f s: %s", total, parts)

    def _end(self) -> None:
        now = time.monotonic()
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now - self._since
        self._since = now


def start_ticks(process: int | str = "self") -> int:
    """When a process was started, in clock ticks since boot: field 22 of proc(5). Raises OSError if it has ended."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])


def process_age_seconds() -> float:
    """Seconds since this process was started; 0 if unknown."""
    try:
        began = start_ticks() / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)


_stages: Stages | None = None


def stage(name: str) -> None:
    """Begin the next stage of this process's start."""
    global _stages
    if _stages is None:
        _stages = Stages(process_age_seconds())
    _stages.enter(name)


def ready() -> None:
    """End this process's start."""
    if _stages is not None:
        _stages.finish()
