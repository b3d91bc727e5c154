"""What a process does before it is ready, and how long each stage takes: logged as it goes, and in all at the end."""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path

logger = logging.getLogger(__name__)

IMPORTS = "imports"  # from the start of the process to the first stage that is named
_READY = re.compile(r"ready after [\d.]+ s: (.*)")
_PART = re.compile(r"([\w ]+) ([\d.]+) s")


class Stages:
    """The stages of one start, one after another."""

    def __init__(self, age_seconds: float) -> None:
        """`age_seconds` have passed since the process was started."""
        self._seconds: dict[str, float] = {}
        self._began = time.monotonic() - age_seconds
        self._name, self._since = IMPORTS, self._began

    def enter(self, name: str) -> None:
        """The next stage, in words that follow "is": "reading weights"."""
        self._end()
        self._name = name
        logger.info("%s", name)

    def finish(self) -> None:
        """The process is ready: logs where the time went."""
        self._end()
        total = self._since - self._began
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self._seconds.items())
        logger.info("ready after %.2f s: %s", total, parts)

    def _end(self) -> None:
        now = time.monotonic()
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now - self._since
        self._since = now


def parts_of(log: str) -> dict[str, float]:
    """Seconds of each stage, as the last start in a log has them; empty where there is none."""
    lines = _READY.findall(log)
    return {name.strip(): float(seconds) for name, seconds in _PART.findall(lines[-1])} if lines else {}


def process_age_seconds() -> float:
    """Since this process was started, by the system's clock; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5): clock ticks after the system's start
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)


_stages: Stages | None = None


def stage(name: str) -> None:
    """The next stage of this process's start; a process starts once."""
    global _stages
    if _stages is None:
        _stages = Stages(process_age_seconds())
    _stages.enter(name)


def ready() -> None:
    """The start of this process is over."""
    if _stages is not None:
        _stages.finish()
