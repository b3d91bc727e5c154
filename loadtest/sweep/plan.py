"""Compares sweeps predicted by `bough plan` with measured ones.

    python -m loadtest.sweep.plan

Plans of the demonstration target, each made anew with speeds measured on the spot, take turns with sweeps of a worker
with the same budget. A plan counts what crosses the link and the matrix products, nothing else, at speeds that it
measures in passing. Ends with one JSON line: by budget and tokens the medians over turns of predicted and measured
seconds and of their `ratio`, measured over predicted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from bough.cli.machine.up import ensure_demonstration
from bough.config.cache_paths import demonstration_folder
from bough.config.flag_parser import FlagParser
from loadtest.common.limits import drop_cached
from loadtest.common.machine import processor
from loadtest.sweep.contestant import SMALL, Contestant

SIZES = (1, 16, 64, 256)


def predicted(model: Path, flags: list[str]) -> dict[int, float]:
    """Predicted seconds of a sweep by number of tokens."""
    command = [sys.executable, "-m", "bough.cli.main", "plan", str(model), *flags, "--json"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {sweep["tokens"]: sweep["seconds"] for sweep in json.loads(output)["sweeps"]}


def compared(model: Path, budget: str, turns: int, repeats: int) -> list[dict[str, object]]:
    """Compare predictions and measurements; a row for each number of tokens."""
    flags = [*SMALL, "--device-memory", budget]
    plans: dict[int, list[float]] = {size: [] for size in SIZES}
    sweeps: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(turns):
        drop_cached(model)
        plan = predicted(model, flags)
        with Contestant("bough", "--model", str(model), *flags, prefix=[]) as engine:
            for size in SIZES:
                plans[size].append(plan[size])
                sweeps[size].append(engine.seconds(size, repeats))
    rows: list[dict[str, object]] = []
    for size in SIZES:
        times = {"predicted": median(plans[size]), "measured": median(sweeps[size])}
        ratios = (measured / plan for measured, plan in zip(sweeps[size], plans[size], strict=True))
        rows.append({"budget": budget, "tokens": size, **{name: round(s, 3) for name, s in times.items()}})
        rows[-1]["ratio"] = round(median(ratios), 3)
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Print a line for each budget and size, and one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--budgets", nargs="+", default=["0.5GB", "1.5GB", "4GB"], help="--device-memory of each")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="sweeps of each turn")
    arguments = parser.parse_args()
    ensure_demonstration()
    model = demonstration_folder()
    rows = [row for budget in arguments.budgets for row in compared(model, budget, arguments.turns, arguments.repeats)]
    print(json.dumps({"model": model.name, "processor": processor(), "cores": os.cpu_count(), "sweeps": rows}))


if __name__ == "__main__":
    main()
