"""How close a sweep comes to what the link and the processor allow, side by side with peers.

    python -m loadtest.sweep

Writes the demonstration target and a 4-bit pack of it, unless they are there. Each contestant is a process of its own;
they take turns, so that whatever else the machine does falls on all alike; figures are medians over the turns. Ends
with one JSON line:

sweep_ratio      for 1, 64 and 256 tokens: sweep / max(raw read of the same bytes, sweep with all weights in memory)
link_busy        share of ten consecutive rounds with drafting during which the link was reading
accelerate_ratio seconds per token of accelerate's disk offload / bough's without speculation, same memory limit
packed4_ratio    sweep of a 4-bit pack / of 16 bits, both limited by a link slowed down to --slow-link
resident_ratio   64 tokens with everything resident / transformers' own forward
peak_over_budget_bytes  worst of several memory budgets: peak of the process less what it took before it knew of a
                 model, less the budget
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bough.client import Client
from bough.commands.demo import UP_DEFAULTS
from bough.commands.up import ensure_demonstration, settings_from
from bough.config import parse_bytes
from bough.demonstration import demonstration_folder
from bough.generation import GenerateOptions, TextPrompt, Tokens
from bough.launch import launched
from loadtest.limits import can_limit, limited

SIZES = (1, 64, 256)
KV = ["--kv-memory", "600MB", "--max-context", "1024"]
NUM_ROUNDS = 10


class Contestant:
    """An engine of `loadtest.sweep_engines` in a process of its own."""

    def __init__(self, *words: str, prefix: list[str]) -> None:
        command = [*prefix, sys.executable, "-m", "loadtest.sweep_engines", *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

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
        return sum(sweep["seconds"] for sweep in sweeps) / repeats

    def _answer(self) -> Any:
        assert self._process.stdout is not None, "it was opened"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self._process.args))} ended with status {self._process.wait()}")  # type: ignore[arg-type]
        return json.loads(line)


def sweep_ratios(model: Path, memory: int, turns: int, repeats: int) -> dict[str, Any]:
    """Streaming within the memory limit, against the bare link and against the bare processor."""
    raw: list[float] = []
    streamed: dict[int, list[float]] = {size: [] for size in SIZES}
    resident: dict[int, list[float]] = {size: [] for size in SIZES}
    own: list[float] = []
    budget = ["--device-memory", str(memory * 2 // 3), "--ring-memory", "256MB"]
    with ExitStack() as stack:
        prefix = stack.enter_context(limited(memory_bytes=memory)) if can_limit() else []
        flags = ["bough", "--model", str(model), *KV]
        link = stack.enter_context(Contestant(*flags, "--resident-layers", "0", *budget, prefix=prefix))
        everything = stack.enter_context(Contestant(*flags, prefix=[]))
        transformers = stack.enter_context(Contestant("transformers", str(model), prefix=[]))
        for turn in range(turns):
            for size in SIZES:
                raw.append(link.ask("raw")["seconds"])
                streamed[size].append(link.seconds(size, repeats))
                resident[size].append(everything.seconds(size, repeats))
            own.append(transformers.seconds(64, repeats))
            _tell(f"turn {turn + 1} of {turns}: raw {raw[-1]:.3f} s, streamed 64 {streamed[64][-1]:.3f} s")
        num_bytes = link.ask("raw")["bytes"]
    ideal = {size: max(median(raw), median(resident[size])) for size in SIZES}
    return {
        "sweep_ratio": {size: round(median(streamed[size]) / ideal[size], 3) for size in SIZES},
        "raw_read_seconds": round(median(raw), 4),
        "link_gigabytes_per_second": round(num_bytes / median(raw) / 1e9, 3),
        "streamed_seconds": {size: round(median(streamed[size]), 4) for size in SIZES},
        "resident_seconds": {size: round(median(resident[size]), 4) for size in SIZES},
        "resident_ratio": round(median(resident[64]) / median(own), 3),
        "memory_limited": can_limit(),
    }


def accelerate_ratio(model: Path, memory: int, turns: int) -> dict[str, Any]:
    """Plain decoding within the same memory limit."""
    mine: list[float] = []
    theirs: list[float] = []
    with ExitStack() as stack:
        prefixes = [stack.enter_context(limited(memory_bytes=memory)) if can_limit() else [] for _ in range(2)]
        budget = ["--device-memory", str(memory * 2 // 3), *KV]
        bough = stack.enter_context(Contestant("bough", "--model", str(model), *budget, prefix=prefixes[0]))
        accelerate = stack.enter_context(Contestant("accelerate", str(model), prefix=prefixes[1]))
        for turn in range(turns):
            mine.append(bough.seconds(1, 3))
            theirs.append(accelerate.seconds(1, 1))
            _tell(f"turn {turn + 1} of {turns}: bough {mine[-1]:.3f} s, accelerate {theirs[-1]:.3f} s per token")
    return {
        "accelerate_ratio": round(median(theirs) / median(mine), 2),
        "accelerate_seconds": round(median(theirs), 3),
        "plain_seconds": round(median(mine), 3),
    }


def packed_ratio(model: Path, packed: Path, slow_link: int, turns: int) -> dict[str, Any]:
    """A pack against 16 bits over the same slow link, for 64 tokens."""
    if not can_limit():
        return {"packed4_ratio": None}
    seconds: dict[Path, list[float]] = {model: [], packed: []}
    with ExitStack() as stack:
        engines = {}
        for folder in seconds:
            prefix = stack.enter_context(limited(read_bytes_per_second=slow_link, disk_of=folder))
            flags = ["bough", "--model", str(folder), "--resident-layers", "0", *KV]
            engines[folder] = stack.enter_context(Contestant(*flags, prefix=prefix))
        for turn in range(turns):
            for folder, engine in engines.items():
                seconds[folder].append(engine.seconds(64, 2))
            _tell(f"turn {turn + 1} of {turns}: 16 bits {seconds[model][-1]:.3f} s, 4 bits {seconds[packed][-1]:.3f} s")
    return {
        "packed4_ratio": round(median(seconds[packed]) / median(seconds[model]), 3),
        "slow_link_gigabytes_per_second": slow_link / 1e9,
        "packed4_seconds": round(median(seconds[packed]), 4),
        "sixteen_bit_seconds": round(median(seconds[model]), 4),
    }


def peak_over_budget(model: Path) -> dict[str, Any]:
    """Budgets from two layers to everything resident."""
    results = {}
    for budget in ("1.1GB", "1.6GB", "2.2GB", "4GB"):
        with Contestant("bough", "--model", str(model), *KV, "--device-memory", budget, prefix=[]) as engine:
            engine.ask("sweep", 256, 2)
            memory = engine.ask("memory")
        results[budget] = int(memory["peak"] - memory["baseline"] - parse_bytes(budget))
        _tell(f"budget {budget}: peak {memory['peak'] / 1e9:.2f} GB, of which {memory['baseline'] / 1e9:.2f} GB before")
    return {"peak_over_budget_bytes": max(results.values()), "peaks_over_budgets": results}


async def link_busy() -> dict[str, Any]:
    """The pipeline as `bough demo` starts it, with a ring that holds what arrives while a tree is grown."""
    os.environ["BOUGH_TARGET_RING_MEMORY"] = "1GB"
    rounds: list[Tokens] = []
    async with launched(settings_from(UP_DEFAULTS), _tell) as cluster, Client(cluster.address) as client:
        options = GenerateOptions(temperature=0.0, max_tokens=128, ignore_eos=True)
        async for event in client.generate(TextPrompt("The history of the lighthouse begins with"), options):
            if isinstance(event, Tokens):
                rounds.append(event)
    counted = [event.timings for event in rounds[1 : 1 + NUM_ROUNDS]]
    total = sum(timings.total_ns for timings in counted)
    return {
        "link_busy": round(sum(timings.link_ns for timings in counted) / total, 4),
        "round_seconds": round(total / len(counted) / 1e9, 4),
        "draft_seconds": round(sum(timings.draft_ns for timings in counted) / len(counted) / 1e9, 4),
    }


def main() -> None:
    """Runs the parts that are asked for, prints their figures, and last all of them in one line."""
    arguments = _arguments()
    ensure_demonstration()
    model = demonstration_folder()
    packed = model.with_name(f"{model.name}-4bit")
    if not (packed / "config.json").is_file() and "packed" in arguments.parts:
        subprocess.run([sys.executable, "-m", "bough.cli", "pack", str(model), "--out", str(packed)], check=True)
    figures: dict[str, Any] = {}
    for part in arguments.parts:
        _tell(f"== {part}")
        match part:
            case "sweep":
                new = sweep_ratios(model, arguments.memory, arguments.turns, arguments.repeats)
            case "busy":
                new = asyncio.run(link_busy())
            case "accelerate":
                new = accelerate_ratio(model, arguments.memory, arguments.turns)
            case "packed":
                new = packed_ratio(model, packed, int(arguments.slow_link * 1e9), arguments.turns)
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
    parser.add_argument("--slow-link", type=float, default=0.5, help="GB/s at which a link is surely the limit")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="sweeps in a row in each turn")
    return parser.parse_args()


if __name__ == "__main__":
    main()
