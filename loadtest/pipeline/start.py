"""Measures the start of `bough up`, by worker and stage.

    python -m loadtest.pipeline.start [--runs 3] [--first | --simulate PROFILE]

Starts and ends it several times: first cold, with the demonstration model and Python's libraries put out of the page
cache as far as no other process uses them, and then warm. Compiled kernels are there already, but in one more start
with `--first`, for which they are compiled. The last line is JSON: seconds of these starts, of warm ones the median,
and seconds of each worker's stages, of warm ones in the last.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy

from bough.config.cache_paths import demonstration_folder
from bough.config.flag_parser import FlagParser
from bough.processes.child import KINDS
from bough.processes.demonstration import ensure_demonstration
from bough.processes.exit_with_parent import MODULE, start

READY = "ready: "  # prefix of the line that `bough up` prints
TOLD = re.compile(r"ready after [\d.]+ s: (.*)")  # logged by `bough.processes.startup`
PART = re.compile(r"([\w ]+) ([\d.]+) s")


def parts_of(log: str) -> dict[str, float]:
    """Seconds of each stage of the last start in a log; empty if there is none."""
    lines = TOLD.findall(log)
    return {name.strip(): float(seconds) for name, seconds in PART.findall(lines[-1])} if lines else {}


@dataclass(frozen=True, slots=True)
class Start:
    """One start of `bough up`."""

    seconds: float  # until it was ready
    parts: dict[str, dict[str, float]]  # seconds by process and stage


def started(flags: Iterable[str], **variables: str) -> Start:
    """Start `bough up` until it is ready, and end it. Raises SystemExit with its last output if it fails."""
    command = [sys.executable, *MODULE, "bough.cli.main", "up", "--port", "0", *flags]
    began = time.monotonic()
    pipe, environ = subprocess.PIPE, os.environ | variables
    process = start(command, lambda line: subprocess.Popen(line, stdout=pipe, stderr=pipe, env=environ))
    assert process.stdout is not None, "it was opened"
    try:
        line = process.stdout.readline().decode()
        seconds = time.monotonic() - began
        if not line.startswith(READY):
            raise SystemExit(f"bough up did not start: {process.communicate()[1].decode()}")
        folder = Path(line.rpartition("logs in ")[2].strip().removesuffix(")"))
        parts = {name: parts_of(path.read_text()) for name in KINDS if (path := folder / f"{name}.log").exists()}
        return Start(seconds, {name: own for name, own in parts.items() if own})
    finally:
        process.terminate()
        process.communicate()


def put_out_of_the_page_cache(*folders: Path) -> None:
    """Drop the page cache, except dirty pages and pages mapped by processes."""
    for folder in folders:
        for path in folder.rglob("*"):
            with suppress(OSError):
                if path.is_file():
                    handle = os.open(path, os.O_RDONLY)
                    try:
                        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                    finally:
                        os.close(handle)


def first_start() -> dict[str, object]:
    """Measure a start without compiled kernels; the draft may still be compiling when it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        first = started([], NUMBA_CACHE_DIR=folder)
    return {"first_seconds": round(first.seconds, 2), "first_parts": first.parts}


def measured(runs: int, flags: list[str]) -> dict[str, object]:
    """Measure a cold start and `num_runs` warm ones."""
    put_out_of_the_page_cache(demonstration_folder(), Path(numpy.__file__).parents[1])
    cold = started(flags)
    warm = [started(flags) for _ in range(runs)]
    return {
        "cold_seconds": round(cold.seconds, 2),
        "warm_seconds": round(statistics.median(each.seconds for each in warm), 2),
        "warm_runs": [round(each.seconds, 2) for each in warm],
        "cold_parts": cold.parts,
        "warm_parts": warm[-1].parts,
    }


def main() -> None:
    """Measure and print one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="warm starts (default 3)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--first", action="store_true", help="one more start, for which kernels are compiled")
    which.add_argument("--simulate", help="a profile: workers without weights")
    arguments = parser.parse_args()
    flags = ["--simulate", arguments.simulate] if arguments.simulate else []
    if not flags:
        ensure_demonstration()
    print(json.dumps((first_start() if arguments.first else {}) | measured(arguments.runs, flags)))


if __name__ == "__main__":
    main()
