"""Measures how close a sweep comes to the limits of link and processor, and compares it with peers.

    python -m loadtest.sweep

Writes the demonstration target, unless it is there. Each contestant is a process of its own;
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
                 in which bough keeps as many layers as fit; from_disk has it against bough with every layer from disk
resident_ratio   by number of tokens: with everything resident / transformers' own forward
peak_over_budget_bytes  worst of several memory budgets: peak of the process less what it took before it knew of a
                 model, less the budget
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from bough.config.cache_paths import demonstration_folder
from bough.config.flag_parser import FlagParser
from bough.config.parsers import parse_bytes
from bough.processes.demonstration import ensure_demonstration
from loadtest.common.limits import can_limit
from loadtest.sweep.parts import peak_over_budget, peer_ratios, sweep_ratios, tell
from loadtest.sweep.rounds import link_busy_at

SIZES = (1, 64, 256)
PIPELINE_BYTES = 3_500_000_000  # memory limit of all processes, which leaves little for the page cache
SLOW_TURNS = 2  # fewer turns, as a throttled link is steady


def main() -> None:
    """Run the requested parts, and print one JSON line."""
    arguments = _arguments()
    ensure_demonstration()
    model = demonstration_folder()
    slow_link = int(arguments.slow_link * 1e9)
    figures: dict[str, Any] = {}
    for part in arguments.parts:
        tell(f"== {part}")
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
            case _:
                new = peak_over_budget(model)
        print(json.dumps(new), flush=True)
        figures |= new
    print(json.dumps({"model": model.name, "cores": os.cpu_count(), **figures}))


def _arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__)
    parts = ["sweep", "busy", "accelerate", "memory"]
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
