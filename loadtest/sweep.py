"""How close a sweep comes to what the link and the processor allow, side by side with peers.

    python -m loadtest.sweep

Writes the demonstration target and a 4-bit pack of it, unless they are there. Each contestant is a process of its own;
they take turns, so that whatever else the machine does falls on all alike; figures are medians over the turns. Sweeps
have new processes in every turn. Ends with one JSON line:

sweep_ratio      by number of tokens: sweep / max(raw read of the same bytes, sweep with all weights in memory) of the
                 same pair; sweep_ratio_slow_link is the same on a link slowed down to --slow-link
work_ratio       the same, but reading costs processor time too: sweep / max(raw read, sweep with all weights in memory
                 + processor time of the raw read / cores), which on few cores is the least that is possible
link_busy        for trees of 16 and 64 nodes: share of ten consecutive rounds with drafting during which the link was
                 reading, a link slowed down to --slow-link; link_busy_unlimited is the same on the disk as it is, where
                 computing may take longer than reading. All processes together have a limit on their memory
accelerate_ratio seconds per token of accelerate's disk offload / bough's without speculation, same memory limit,
                 in which bough keeps as many layers as fit; airllm_ratio likewise, where it is installed (`pip install
                 airllm`; it is no part of bough's set-up). from_disk has both against bough with every layer from disk
packed4_ratio    for 1, 16 and 64 tokens: sweep of a 4-bit pack / of 16 bits, both over a link slowed down to
                 --slow-link; where computing takes longer than a quarter of the read, that is the limit
resident_ratio   by number of tokens: with everything resident / transformers' own forward
peak_over_budget_bytes  worst of several memory budgets: peak of the process less what it took before it knew of a
                 model, less the budget
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from bough.cli.up import ensure_demonstration
from bough.config.cache_paths import demonstration_folder
from bough.config.parsers import parse_bytes
from loadtest.limits import can_limit, drop_cached, limited
from loadtest.sweep_rounds import link_busy_at

SIZES = (1, 64, 256)
PACKED_SIZES = (1, 16, 64)
SMALL = ["--kv-memory", "200MB", "--max-context", "512", "--max-nodes", "256", "--max-sweep-tokens", "256"]
INTERPRETER_BYTES = 600_000_000  # what Python, torch and transformers take before there is a model
PIPELINE_BYTES = 3_500_000_000  # of all its processes, whose weights and ring leave the page cache little
SLOW_TURNS = 2  # a slow link is steady
BUDGETS = "0.34GB", "0.5GB", "1GB", "2GB", "4GB"  # the first holds no more than two layers


class Contestant:
    """An engine of `loadtest.sweep_engines` in a process of its own."""

    def __init__(self, *words: str, prefix: list[str]) -> None:
        command = [*prefix, sys.executable, "-m", "loadtest.sweep_engines", *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.first_token_seconds = float(self._answer())  # from opening the model

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None, "it was opened"
        self._process.stdin.close()
        self._process.wait(60)

    def ask(self, *command: str | int) -> Any:
        """Sends a command and waits for its answer."""
        assert self._process.stdin is not None, "it was opened"
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._answer()

    def seconds(self, num_tokens: int, repeats: int) -> float:
        """Of one sweep, of several right after one another, the first of which does not count."""
        sweeps = self.ask("sweep", num_tokens, repeats + 1)[1:]
        return float(sum(sweep["seconds"] for sweep in sweeps) / repeats)

    def _answer(self) -> Any:
        assert self._process.stdout is not None, "it was opened"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self._process.args))} ended with status {self._process.wait()}")  # type: ignore[arg-type]
        return json.loads(line)


class Measured(NamedTuple):
    """Seconds for one number of tokens, close together in time."""

    raw: float  # read of what crosses the link, mean of before and after
    reading: float  # of all processors, in such a read
    streamed: float
    resident: float

    @property
    def ratio(self) -> float:
        """To the slower of link and processor."""
        return self.streamed / max(self.raw, self.resident)

    @property
    def work_ratio(self) -> float:
        """The same where reading costs processor time too."""
        return self.streamed / max(self.raw, self.resident + self.reading / (os.cpu_count() or 1))


class Turn(NamedTuple):
    """Of new processes."""

    by_size: dict[int, list[Measured]]  # number of tokens: one after another
    transformers: dict[int, float]  # seconds by number of tokens; none for a slow link
    num_bytes: int  # that cross the link


def sweep_turn(model: Path, memory: int, link_speed: int, sizes: Sequence[int], pairs: int, repeats: int) -> Turn:
    """Reads, `repeats` sweeps, sweeps in memory, and so on by turns, ending with a read: a disk changes its speed."""
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
    """Streaming within the memory limit, against the bare link and the bare processor, turn by turn.

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
                _tell(f"turn {turn + 1} of {turns}: {size} tokens: {times}: {each.ratio:.3f}")

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
    """The first and the third."""
    return [round(float(quartile), 3) for quartile in np.percentile(numbers, (25, 75))]


def peer_ratios(model: Path, memory: int, turns: int) -> dict[str, Any]:
    """Plain decoding within the same memory limit, and from opening the model to the first token."""
    peers = ["accelerate", *(["airllm"] if find_spec("airllm") else [])]
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
            _tell(f"turn {turn + 1} of {turns}: {times} per token")
    medians = {name: median(some) for name, some in seconds.items()}
    return {
        **{f"{name}_ratio": round(medians[name] / medians["bough"], 2) for name in peers},
        "from_disk": {name: round(medians[name] / medians["bough from disk"], 2) for name in peers},
        "seconds_per_token": {name: round(of_name, 3) for name, of_name in medians.items()},
        "first_token_seconds": {name: round(engine.first_token_seconds, 2) for name, engine in engines.items()},
    }


def packed_ratio(model: Path, packed: Path, slow_link: int, turns: int) -> dict[str, Any]:
    """A pack against 16 bits over the same slow link; rings are small, lest one be filled in between."""
    if not can_limit():
        return {"packed4_ratio": None}
    with ExitStack() as stack:
        engines = {}
        for name, folder in (("sixteen_bit", model), ("packed4", packed)):
            prefix = stack.enter_context(limited(read_bytes_per_second=slow_link, disk_of=folder))
            flags = ["bough", "--model", str(folder), "--resident-layers", "0", "--ring-memory", "64MB", *SMALL]
            engines[name] = stack.enter_context(Contestant(*flags, prefix=prefix))
        seconds: dict[str, dict[int, list[float]]] = {name: {size: [] for size in PACKED_SIZES} for name in engines}
        for turn in range(turns):
            for size in PACKED_SIZES:
                for name, engine in engines.items():
                    seconds[name][size].append(engine.seconds(size, 2))
                times = ", ".join(f"{name} {seconds[name][size][-1]:.3f} s" for name in engines)
                _tell(f"turn {turn + 1} of {turns}: {size} tokens: {times}")
    medians = {name: {size: median(times) for size, times in of.items()} for name, of in seconds.items()}
    ratios = {size: round(medians["packed4"][size] / medians["sixteen_bit"][size], 3) for size in PACKED_SIZES}
    rounded = {f"{name}_seconds": {size: round(s, 4) for size, s in of.items()} for name, of in medians.items()}
    return {"packed4_ratio": ratios, "slow_link_gigabytes_per_second": slow_link / 1e9, **rounded}


def peak_over_budget(model: Path) -> dict[str, Any]:
    """Budgets from two layers to everything resident."""
    results = {}
    for budget in BUDGETS:
        with Contestant("bough", "--model", str(model), *SMALL, "--device-memory", budget, prefix=[]) as engine:
            engine.ask("sweep", 256, 2)
            memory = engine.ask("memory")
        results[budget] = int(memory["peak"] - memory["baseline"] - parse_bytes(budget))
        _tell(f"budget {budget}: peak {memory['peak'] / 1e9:.2f} GB, of which {memory['baseline'] / 1e9:.2f} GB before")
    return {"peak_over_budget_bytes": max(results.values()), "peaks_over_budgets": results}


def main() -> None:
    """Runs the parts that are asked for, prints their figures, and last all of them in one line."""
    arguments = _arguments()
    ensure_demonstration()
    model = demonstration_folder()
    packed = model.with_name(f"{model.name}-4bit")
    if not (packed / "config.json").is_file() and "packed" in arguments.parts:
        subprocess.run([sys.executable, "-m", "bough.cli", "pack", str(model), "--out", str(packed)], check=True)
    slow_link = int(arguments.slow_link * 1e9)
    figures: dict[str, Any] = {}
    for part in arguments.parts:
        _tell(f"== {part}")
        match part:
            case "sweep":
                counts = arguments.sizes, arguments.turns, arguments.pairs, arguments.repeats
                new = sweep_ratios(model, arguments.memory, 0, *counts)
                if can_limit():
                    slow = sweep_ratios(model, arguments.memory, slow_link, arguments.sizes, SLOW_TURNS, 1, 1)
                    new |= {"sweep_ratio_slow_link": slow["sweep_ratio"], "slow_link": slow}
            case "busy":
                speeds, memory = ([0, slow_link], PIPELINE_BYTES) if can_limit() else ([0], 0)
                new = link_busy_at(speeds, model, memory)
            case "accelerate":
                new = peer_ratios(model, arguments.memory, arguments.turns)
            case "packed":
                new = packed_ratio(model, packed, slow_link, arguments.turns)
            case _:
                new = peak_over_budget(model)
        print(json.dumps(new), flush=True)
        figures |= new
    print(json.dumps({"model": model.name, "cores": os.cpu_count(), **figures}))


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["sweep", "busy", "accelerate", "packed", "memory"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--memory", type=parse_bytes, default=parse_bytes("1.5GB"), help="limit of the control group")
    parser.add_argument("--slow-link", type=float, default=0.8, help="GB/s at which a link is surely the limit")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="tokens of a sweep, in the first part")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=5, help="of raw reads and sweeps in each turn")
    parser.add_argument("--repeats", type=int, default=1, help="sweeps in a row in each pair, but for the first")
    return parser.parse_args()


if __name__ == "__main__":
    main()
