"""How fast a checkpoint is read while the processors do something else: nothing, spin, or stream through memory.

    python -m loadtest.contention

A sweep reads while it computes, and what it computes with comes from memory. Reads that slow down beside memory's
traffic, but not beside as many processors that only spin, are slowed by the memory (or by whoever else serves disk and
memory here), not by how they are scheduled. By turns; ends with one JSON line: seconds for a raw read of the
demonstration's layers in each company, and the ratio to those alone, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from bough.cli.up import ensure_demonstration
from bough.config.cache_paths import demonstration_folder
from loadtest.sweep_engines import Bough

COMPANY = {
    "alone": "",
    "spinning": "while True: pass",
    "memory": "import numpy\nnumbers = numpy.ones(1 << 25)\nwhile True: numbers.sum()",
}
SETTLE_SECONDS = 1.0


@contextmanager
def company(code: str) -> Iterator[None]:
    """One process on each processor that runs some Python."""
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(os.cpu_count() or 1) if code]
    try:
        time.sleep(SETTLE_SECONDS)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Prints a line for each turn, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    ensure_demonstration()
    engine = Bough(["--model", str(demonstration_folder()), "--resident-layers", "0"])
    seconds: dict[str, list[float]] = {name: [] for name in COMPANY}
    for _ in range(turns):
        for name, code in COMPANY.items():
            with company(code):
                seconds[name].append(engine.raw()["seconds"])
        print({name: round(times[-1], 3) for name, times in seconds.items()}, flush=True)
    engine.close()
    medians = {name: median(times) for name, times in seconds.items()}
    ratios = {
        name: round(median(t / a for t, a in zip(times, seconds["alone"], strict=True)), 3)
        for name, times in seconds.items()
    }
    print(
        json.dumps({"seconds": {k: round(v, 3) for k, v in medians.items()}, "ratio": ratios, "cores": os.cpu_count()})
    )


if __name__ == "__main__":
    main()
