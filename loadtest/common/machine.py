"""The machine that a benchmark runs on, and how long a call takes on it."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path


def processor() -> str:
    """The processor's name, as the system reports it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def timed(function: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
