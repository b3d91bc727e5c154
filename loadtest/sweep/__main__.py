"""Measures how close a sweep comes to the limits of link and processor.

    python -m loadtest.sweep

Writes the demonstration target first, if it is missing. Streamed weights and weights in memory are measured in separate
processes, new ones in every turn. They alternate, which spreads other load on the machine evenly. Figures are medians
over the turns. Ends with one JSON line:

sweep_ratio      by number of tokens: sweep / max(raw read of the same bytes, sweep with all weights in memory) of the
                 same pair; sweep_ratio_slow_link is the same on a link limited to --slow-link
work_ratio       the same, including the processor time of reading: sweep / max(raw read, sweep with all weights in
                 memory + processor time of the raw read / cores), the least possible on few cores
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from bough.config.cache_paths import demonstration_folder
from bough.config.flag_parser import FlagParser
from bough.config.parsers import parse_bytes
from bough.processes.demonstration import ensure_demonstration
from loadtest.common.limits import can_limit, limited

SIZES = (1, 64, 256)
SLOW_TURNS = 2  # fewer turns, as a throttled link is steady
INTERPRETER_BYTES = 600_000_000  # memory of Python, torch and transformers without a model
SMALL = ["--kv-memory", "200MB", "--max-context", "512", "--max-nodes", "256", "--max-sweep-tokens", "256"]  # targets


class Contestant:
    """`loadtest.sweep.engine` in its own process."""

    def __init__(self, *words: str, prefix: list[str]) -> None:
        command = [*prefix, sys.executable, "-m", "loadtest.sweep.engine", *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()  # once the first token is there

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None, "it was opened"
        self._process.stdin.close()
        self._process.wait(60)

    def ask(self, *command: str | int) -> Any:
        """Send a command and wait for its answer."""
        assert self._process.stdin is not None, "it was opened"
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._answer()

    def seconds(self, num_tokens: int, repeats: int) -> float:
        """Seconds of one sweep, from several consecutive ones without the first."""
        sweeps = self.ask("sweep", num_tokens, repeats + 1)[1:]
        return float(sum(sweep["seconds"] for sweep in sweeps) / repeats)

    def _answer(self) -> Any:
        assert self._process.stdout is not None, "it was opened"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self._process.args))} ended with status {self._process.wait()}")  # type: ignore[arg-type]
        return json.loads(line)


class Measured(NamedTuple):
    """Seconds for one number of tokens, measured close together in time."""

    raw: float  # reading a sweep's bytes, mean of before and after
    reading: float  # processor time of such a read
    streamed: float
    resident: float

    @property
    def ratio(self) -> float:
        """Ratio to the slower of link and processor."""
        return self.streamed / max(self.raw, self.resident)

    @property
    def work_ratio(self) -> float:
        """The ratio if the processor time of reading counts as well."""
        return self.streamed / max(self.raw, self.resident + self.reading / (os.cpu_count() or 1))


class Turn(NamedTuple):
    """Measurements with new processes."""

    by_size: dict[int, list[Measured]]  # by number of tokens
    num_bytes: int  # that cross the link in a sweep


def sweep_turn(model: Path, memory: int, link_speed: int, sizes: Sequence[int], pairs: int, repeats: int) -> Turn:
    """Alternate reads, sweeps and sweeps in memory, ending with a read, as a disk's speed varies."""
    budget = ["--device-memory", str(memory - INTERPRETER_BYTES), "--ring-memory", "256MB"]
    flags, measured = ["--model", str(model), *SMALL], dict[int, list[Measured]]()
    with ExitStack() as stack:
        prefix = stack.enter_context(limited(memory, link_speed, model)) if can_limit() else []
        link = stack.enter_context(Contestant(*flags, "--resident-layers", "0", *budget, prefix=prefix))
        everything = stack.enter_context(Contestant(*flags, prefix=[]))
        for size in sizes:
            measured[size], before = [], link.ask("raw")
            for _ in range(pairs):
                streamed, resident = link.seconds(size, repeats), everything.seconds(size, repeats)
                after = link.ask("raw")
                raw, reading = ((before[key] + after[key]) / 2 for key in ("seconds", "processor_seconds"))
                measured[size].append(Measured(raw, reading, streamed, resident))
                before = after
    return Turn(measured, before["bytes"])


def sweep_ratios(
    model: Path, memory: int, link_speed: int, sizes: Sequence[int], turns: int, pairs: int, repeats: int
) -> dict[str, Any]:
    """Ratios of sweeps within the memory limit to the bare link and the bare processor, by turn.

    `link_speed` in bytes per second slows the link down; 0 leaves it as it is. Each turn has new processes:
    two of one kind differ in speed for as long as they live, by which memory they were given.
    """
    measured: dict[int, list[Measured]] = {size: [] for size in sizes}
    for turn in range(turns):
        by_size, num_bytes = sweep_turn(model, memory, link_speed, sizes, pairs, repeats)
        for size, some in by_size.items():
            measured[size] += some
            for each in some:
                times = f"raw {each.raw:.3f}, streamed {each.streamed:.3f}, resident {each.resident:.3f} s"
                progress(f"turn {turn + 1} of {turns}: {size} tokens: {times}: {each.ratio:.3f}")

    def medians(figure: Callable[[Measured], float], digits: int) -> dict[int, float]:
        return {size: round(median(map(figure, turns_of)), digits) for size, turns_of in measured.items()}

    everyone = [each for turns_of in measured.values() for each in turns_of]
    raw_seconds = median(each.raw for each in everyone)
    return {
        "sweep_ratio": medians(lambda each: each.ratio, 3),
        "sweep_ratio_quartiles": {size: quartiles([each.ratio for each in some]) for size, some in measured.items()},
        "work_ratio": medians(lambda each: each.work_ratio, 3),
        "raw_read_processor_seconds": round(median(each.reading for each in everyone), 3),
        "raw_read_seconds": round(raw_seconds, 4),
        "link_gigabytes_per_second": round(num_bytes / raw_seconds / 1e9, 3),
        "streamed_seconds": medians(lambda each: each.streamed, 4),
        "resident_seconds": medians(lambda each: each.resident, 4),
        "memory_limited": can_limit(),
    }


def quartiles(numbers: Sequence[float]) -> list[float]:
    """The first and the third quartile."""
    return [round(float(quartile), 3) for quartile in np.percentile(numbers, (25, 75))]


def progress(text: str) -> None:
    """Print progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, and print one JSON line."""
    arguments = _arguments()
    ensure_demonstration()
    model = demonstration_folder()
    slow_link = int(arguments.slow_link * 1e9)
    counts = arguments.sizes, arguments.turns, arguments.pairs, arguments.repeats
    figures = sweep_ratios(model, arguments.memory, 0, *counts)
    if can_limit():
        slow = sweep_ratios(model, arguments.memory, slow_link, arguments.sizes, SLOW_TURNS, 1, 1)
        figures |= {"sweep_ratio_slow_link": slow["sweep_ratio"], "slow_link": slow}
    print(json.dumps({"model": model.name, "cores": os.cpu_count(), **figures}))


def _arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__)
    parser.add_argument("--memory", type=parse_bytes, default=parse_bytes("1.5GB"), help="limit of the control group")
    parser.add_argument("--slow-link", type=float, default=0.8, help="GB/s of a link that is certainly the limit")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="tokens of a sweep")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of raw reads and sweeps in each turn")
    parser.add_argument("--repeats", type=int, default=1, help="consecutive sweeps that are timed in each pair")
    return parser.parse_args()


if __name__ == "__main__":
    main()
