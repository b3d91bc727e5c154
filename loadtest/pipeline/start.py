"""How long `bough up` takes until it is ready, and what each worker does in that time.

    python -m loadtest.pipeline.start [--runs 3] [--simulate PROFILE]

Starts and ends it several times: first cold, with the demonstration model and Python's libraries put out of the page
cache as far as no other process uses them, and then warm. Compiled kernels are there already. The last line is JSON:
seconds of the cold start and the median of the warm ones, and seconds of each worker's stages in the last of them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy

from bough.cli.machine.up import ensure_demonstration
from bough.config.cache_paths import demonstration_folder
from bough.config.flag_parser import FlagParser
from bough.processes.child import KINDS
from bough.processes.exit_with_parent import MODULE, start
from bough.processes.startup import parts_of

READY = "ready: "  # of the line that `bough up` prints


@dataclass(frozen=True, slots=True)
class Start:
    """One start of `bough up`."""

    seconds: float  # until it said that it is ready
    parts: dict[str, dict[str, float]]  # seconds of the stages, by process


def started(flags: Iterable[str]) -> Start:
    """Starts `bough up` until it is ready, and ends it. Raises SystemExit with its last words where it fails."""
    command = [sys.executable, *MODULE, "bough.cli.main", "up", "--port", "0", *flags]
    began = time.monotonic()
    process = start(command, lambda line: subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
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
    """What is written to disk and mapped by no process is read from there again."""
    for folder in folders:
        for path in folder.rglob("*"):
            with suppress(OSError):
                if path.is_file():
                    handle = os.open(path, os.O_RDONLY)
                    try:
                        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                    finally:
                        os.close(handle)


def measured(runs: int, flags: list[str]) -> dict[str, object]:
    """A cold start and so many warm ones."""
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
    """Measures, and prints one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="warm starts (default 3)")
    parser.add_argument("--simulate", help="a profile: workers without weights")
    arguments = parser.parse_args()
    flags = ["--simulate", arguments.simulate] if arguments.simulate else []
    if not flags:
        ensure_demonstration()
    print(json.dumps(measured(arguments.runs, flags)))


if __name__ == "__main__":
    main()
