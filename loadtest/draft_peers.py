"""A draft step by bough's own path beside transformers', as it is and compiled by torch.

    python -m loadtest.draft_peers

The same model (SmolLM2), nodes and context for all; transformers has a static cache and a chain where bough has a tree.
Contestants take turns. Ends with one JSON line: milliseconds of a step (median over turns) by contestant and nodes, and
what compiling took.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StaticCache

from bough.cli.up import ensure_demonstration
from bough.config.cache_paths import demonstration_folder
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.cpu.threads import compute_with
from draft_worker.model.sources import load_draft
from loadtest.draft_step import CPU, processor, steps, timed

CONTEXT, KV_BYTES = 200, 200 * 10**6
Step = Callable[[], object]


def transformers_steps(nodes: list[int], is_compiled: bool) -> dict[int, Step]:
    """By number of nodes, a forward pass of so many tokens after the context."""
    model = AutoModelForCausalLM.from_pretrained(demonstration_folder(0), dtype=torch.bfloat16)
    forward = torch.compile(model.forward, dynamic=False) if is_compiled else model.forward
    cache = StaticCache(config=model.config, max_cache_len=CONTEXT + max(nodes))
    layers: list[Any] = cache.layers
    with torch.inference_mode():
        model.forward(torch.randint(0, 1000, (1, CONTEXT)), past_key_values=cache)

    def step(num_nodes: int) -> Step:
        tokens = torch.randint(0, 1000, (1, num_nodes))

        def run() -> None:
            with torch.inference_mode():
                for layer in layers:
                    layer.cumulative_length.fill_(CONTEXT)
                forward(tokens, past_key_values=cache)

        return run

    return {num_nodes: step(num_nodes) for num_nodes in nodes}


def main() -> None:
    """Prints a line for each contestant, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--turns", type=int, default=15)
    arguments = parser.parse_args()
    ensure_demonstration(0)
    compute_with(arguments.threads)
    contestants: dict[str, dict[int, Step]] = {}
    for bits in ("16", "8"):
        model = load_draft(Checkpoint.open(demonstration_folder(0)), (), "bfloat16", CPU, bits=bits)
        contestants[f"bough, {bits} bits"] = steps(model, KV_BYTES, CONTEXT, arguments.nodes)
    for name, is_compiled in (("transformers", False), ("transformers, compiled", True)):
        contestants[name] = transformers_steps(arguments.nodes, is_compiled)
    began = time.perf_counter()
    first = {name: [timed(step) for step in of.values()] for name, of in contestants.items()}
    print(f"warm after {time.perf_counter() - began:.0f} s", flush=True)
    seconds: dict[str, dict[int, list[float]]] = {name: {n: [] for n in of} for name, of in contestants.items()}
    for _ in range(arguments.turns):
        for name, of in contestants.items():
            for num_nodes, step in of.items():
                seconds[name][num_nodes].append(timed(step))
    times = {name: {n: round(1e3 * median(some), 2) for n, some in of.items()} for name, of in seconds.items()}
    for name, of_nodes in times.items():
        print(f"{name:>24}", of_nodes, flush=True)
    compiling = round(sum(first["transformers, compiled"]), 1)
    print(json.dumps({"processor": processor(), "milliseconds": times, "compiling_seconds": compiling}))


if __name__ == "__main__":
    main()
