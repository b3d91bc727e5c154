"""What a draft step costs beside reading the draft's weights from memory once, by nodes in the frontier.

    python -m loadtest.draft_step --drop-layers 3,14

Turn by turn: a read of as many bytes as the weights take (summed by torch, on the same threads; in large pages as the
weights are, and in small ones), then a step of each size after the same context. Medians over turns, and quartiles of
the step's; ends with one JSON line, which has the ratio of the fastest too: on a shared machine the least disturbed.
Steps are the model's alone: choosing which nodes to expand is not in them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from bough.commands.up import ensure_demonstration
from bough.demonstration import demonstration_folder
from bough.model.batch import Batch, Segment
from bough.model.checkpoint import Checkpoint
from bough.model.kv import KVSlot
from bough.model.pages import large_pages
from bough.model.runner import ResidentModel
from bough.model.threads import compute_with
from bough.tree import Tree
from bough.values import parse_bytes, parse_layers
from draft_worker.sources import load_draft

CPU = torch.device("cpu")


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def weight_bytes(model: ResidentModel) -> int:
    """Of all parameters in the data type that is computed in, those that are shared once."""
    slots = [*model.skeleton.resident_slots, *(slot for layer in model.skeleton.layer_slots for slot in layer)]
    shapes = {slot.source.places: slot.source.shape for slot in slots}
    return sum(int(np.prod(shape)) for shape in shapes.values()) * model.skeleton.dtype.itemsize


def frontier(num_nodes: int, seed: int) -> Tree:
    """A random tree whose nodes are all run at once."""
    rng = np.random.default_rng(seed)
    parents = [-1] + [int(rng.integers(max(0, node - 6), node)) for node in range(1, num_nodes)]
    return Tree.of([1000 + node for node in range(num_nodes)], parents, [0.0] * num_nodes)


def measure(
    model: ResidentModel, kv_bytes: int, context: int, nodes: Sequence[int], turns: int
) -> dict[str, list[float]]:
    """Seconds of each turn: of the two reads, and of a step by its number of nodes."""
    shape, num_rows = model.skeleton.kv_shape(), context + max(nodes)
    slot = KVSlot(shape, 0, CPU)
    slot.place(shape.empty(kv_bytes // shape.row_bytes, CPU), 0, num_rows)  # as among a worker's
    tokens = np.random.default_rng(1).integers(0, model.skeleton.vocab_size, context).tolist()
    model.logits(Batch([Segment.context(slot, 0, tokens)], None, CPU))

    def step(num_nodes: int) -> Callable[[], object]:
        tree = frontier(num_nodes, num_nodes)
        return lambda: model.logits(Batch([Segment.tree(slot, context, tree)], None, CPU))

    num_bytes = weight_bytes(model)
    large = torch.frombuffer(large_pages(num_bytes // 4 * 4), dtype=torch.float32).fill_(1)
    small = torch.ones(num_bytes // 4)
    parts: dict[str, Callable[[], object]] = {"read": large.sum, "read in small pages": small.sum}
    parts |= {str(num_nodes): step(num_nodes) for num_nodes in nodes}
    for part in parts.values():
        part()  # compiles, and makes room
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(turns):
        for name, part in parts.items():
            seconds[name].append(timed(part))
    return seconds


def processor() -> str:
    """As the system names it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def main() -> None:
    """Prints a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="SmolLM2 as it is by default")
    parser.add_argument("--drop-layers", default="3,14")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument(
        "--kv-memory", type=parse_bytes, default=parse_bytes("2GB"), help="that the session is a part of"
    )
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--turns", type=int, default=21)
    arguments = parser.parse_args()
    if arguments.model is None:
        ensure_demonstration(0)
    checkpoint = Checkpoint.open(str(arguments.model or demonstration_folder(0)))
    compute_with(arguments.threads)
    model = load_draft(checkpoint, parse_layers(arguments.drop_layers), arguments.dtype, CPU)
    seconds = measure(model, arguments.kv_memory, arguments.context, arguments.nodes, arguments.turns)
    ms = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
    print(f"{weight_bytes(model) / 1e6:.0f} MB of weights; read in {ms['read']:.1f} ms")
    print(f"{'nodes':>5} {'ms':>7} {'quartiles':>15} {'ratio':>6}")
    for nodes in map(str, arguments.nodes):
        low, _, high = statistics.quantiles(seconds[nodes], n=4)
        print(f"{nodes:>5} {ms[nodes]:7.1f} {low * 1e3:7.1f}-{high * 1e3:.1f} {ms[nodes] / ms['read']:6.2f}")
    print(
        json.dumps(
            {
                "draft_step_ratio": {str(n): round(ms[str(n)] / ms["read"], 3) for n in arguments.nodes},
                "ratio_of_fastest": {
                    str(n): round(min(seconds[str(n)]) / min(seconds["read"]), 3) for n in arguments.nodes
                },
                "milliseconds": {name: round(value, 2) for name, value in ms.items()},
                "weight_bytes": weight_bytes(model),
                "model": model.skeleton.describe(),
                "context": arguments.context,
                "turns": arguments.turns,
                "threads": arguments.threads,
                "processor": processor(),
            }
        )
    )


if __name__ == "__main__":
    main()
