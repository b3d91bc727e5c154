"""The parts of `loadtest.sweep`: limits of link and processor, a peer, and peak memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from bough.config.parsers import parse_bytes
from loadtest.common.limits import can_limit, drop_cached, limited
from loadtest.sweep.contestant import SMALL, Contestant

INTERPRETER_BYTES = 600_000_000  # memory of Python, torch and transformers without a model
BUDGETS = "0.34GB", "0.5GB", "1GB", "2GB", "4GB"  # the first holds only two layers


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
    transformers: dict[int, float]  # seconds by number of tokens; empty for a slow link
    num_bytes: int  # that cross the link in a sweep


def sweep_turn(model: Path, memory: int, link_speed: int, sizes: Sequence[int], pairs: int, repeats: int) -> Turn:
    """Alternate reads, sweeps and sweeps in memory, ending with a read, as a disk's speed varies."""
    budget = ["--device-memory", str(memory - INTERPRETER_BYTES), "--ring-memory", "256MB"]
    flags, measured = ["bough", "--model", str(model), *SMALL], dict[int, list[Measured]]()
    with ExitStack() as stack:
        prefix = stack.enter_context(limited(memory, link_speed, model)) if can_limit() else []
        link = stack.enter_context(Contestant(*flags, "--resident-layers", "0", *budget, prefix=prefix))
        everything = stack.enter_context(Contestant(*flags, prefix=[]))
        own = {}
        if not link_speed:
            transformers = stack.enter_context(Contestant("transformers", str(model), prefix=[]))
            own = {size: transformers.seconds(size, repeats) for size in sizes}
        for size in sizes:
            measured[size], before = [], link.ask("raw")
            for _ in range(pairs):
                streamed, resident = link.seconds(size, repeats), everything.seconds(size, repeats)
                after = link.ask("raw")
                raw, reading = ((before[key] + after[key]) / 2 for key in ("seconds", "processor_seconds"))
                measured[size].append(Measured(raw, reading, streamed, resident))
                before = after
    return Turn(measured, own, before["bytes"])


def sweep_ratios(
    model: Path, memory: int, link_speed: int, sizes: Sequence[int], turns: int, pairs: int, repeats: int
) -> dict[str, Any]:
    """Ratios of sweeps within the memory limit to the bare link and the bare processor, by turn.

    `link_speed` in bytes per second slows the link down; 0 leaves it as it is. Each turn has processes of its own:
    two of one kind differ in speed for as long as they live, by which memory they were given.
    """
    measured: dict[int, list[Measured]] = {size: [] for size in sizes}
    resident_ratios: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(turns):
        by_size, own, num_bytes = sweep_turn(model, memory, link_speed, sizes, pairs, repeats)
        for size, some in by_size.items():
            resident_ratios[size] += [median(each.resident for each in some) / own[size]] if own else []
            measured[size] += some
            for each in some:
                times = f"raw {each.raw:.3f}, streamed {each.streamed:.3f}, resident {each.resident:.3f} s"
                tell(f"turn {turn + 1} of {turns}: {size} tokens: {times}: {each.ratio:.3f}")

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
        "resident_ratio": {size: round(median(ratios), 3) for size, ratios in resident_ratios.items() if ratios},
        "memory_limited": can_limit(),
    }


def quartiles(numbers: Sequence[float]) -> list[float]:
    """The first and the third quartile."""
    return [round(float(quartile), 3) for quartile in np.percentile(numbers, (25, 75))]


def peer_ratios(model: Path, memory: int, turns: int) -> dict[str, Any]:
    """Ratios of peers to plain decoding within the same memory limit, and times to the first token."""
    peers = ["accelerate"]
    names = ["bough", "bough from disk", *peers]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        engines = {}
        for name in names:
            prefix = stack.enter_context(limited(memory_bytes=memory)) if can_limit() else []
            budget = ["--device-memory", str(memory - INTERPRETER_BYTES), *SMALL]
            if name == "bough from disk":
                budget += ["--resident-layers", "0"]
            flags = [str(model)] if name in peers else ["--model", str(model), *budget]
            engines[name] = stack.enter_context(Contestant(name.split()[0], *flags, prefix=prefix))
        for turn in range(turns):
            for name, engine in engines.items():
                drop_cached(model)
                seconds[name].append(engine.seconds(1, 1 if name in peers else 3))
            times = ", ".join(f"{name} {some[-1]:.3f} s" for name, some in seconds.items())
            tell(f"turn {turn + 1} of {turns}: {times} per token")
    medians = {name: median(some) for name, some in seconds.items()}
    return {
        **{f"{name}_ratio": round(medians[name] / medians["bough"], 2) for name in peers},
        "from_disk": {name: round(medians[name] / medians["bough from disk"], 2) for name in peers},
        "seconds_per_token": {name: round(of_name, 3) for name, of_name in medians.items()},
        "first_token_seconds": {name: round(engine.first_token_seconds, 2) for name, engine in engines.items()},
    }


def peak_over_budget(model: Path) -> dict[str, Any]:
    """Peak memory minus the budget, for budgets from two layers to the whole model."""
    results = {}
    for budget in BUDGETS:
        with Contestant("bough", "--model", str(model), *SMALL, "--device-memory", budget, prefix=[]) as engine:
            engine.ask("sweep", 256, 2)
            memory = engine.ask("memory")
        results[budget] = int(memory["peak"] - memory["baseline"] - parse_bytes(budget))
        tell(f"budget {budget}: peak {memory['peak'] / 1e9:.2f} GB, of which {memory['baseline'] / 1e9:.2f} GB before")
    return {"peak_over_budget_bytes": max(results.values()), "peaks_over_budgets": results}


def tell(text: str) -> None:
    """Print progress on standard error."""
    print(text, file=sys.stderr, flush=True)
