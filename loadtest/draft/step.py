"""Compares a draft step with reading the draft's weights from memory once, by number of frontier nodes.

    python -m loadtest.draft.step --drop-layers 3,14 --bits 16 8

Turn by turn: a read of as many bytes as the checkpoint's weights take in memory (summed by torch, on the same threads;
in large pages as the weights are, and in small ones), then with products in each number of bits a step of each size
after the same context. Medians over turns, and quartiles of the step's; ends with one JSON line, which has the ratio of
the fastest too: on a shared machine the least disturbed. In 8 bits half as much is read, so `ratio_to_own_read` also
compares with a read of that. Steps are the model's alone: choosing which nodes to expand is not in them.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bough.config.cache_paths import demonstration_folder
from bough.config.flag_parser import FlagParser
from bough.config.parsers import DRAFT_BITS, parse_bytes, parse_layers
from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.cpu.huge_pages import large_pages
from bough.model.cpu.threads import compute_with
from bough.model.kv.session_kv import KVSlot
from bough.model.running.runner import ResidentModel
from bough.processes.demonstration import ensure_demonstration
from bough.trees.tree import Tree
from draft_worker.model.sources import load_draft
from loadtest.common.machine import processor, timed

CPU = torch.device("cpu")


def weight_bytes(model: ResidentModel) -> int:
    """Bytes of all parameters in the compute type; shared ones count once."""
    slots = [*model.skeleton.resident_slots, *(slot for layer in model.skeleton.layer_slots for slot in layer)]
    shapes = {slot.source.places: slot.source.shape for slot in slots}
    return sum(int(np.prod(shape)) for shape in shapes.values()) * model.skeleton.dtype.itemsize


def frontier(num_nodes: int, seed: int) -> Tree:
    """A segment with a random tree of `num_nodes` nodes."""
    rng = np.random.default_rng(seed)
    parents = [-1] + [int(rng.integers(max(0, node - 6), node)) for node in range(1, num_nodes)]
    return Tree.of([1000 + node for node in range(num_nodes)], parents, [0.0] * num_nodes)


def steps(model: ResidentModel, kv_bytes: int, context: int, nodes: Sequence[int]) -> dict[int, Callable[[], object]]:
    """A function for each number of nodes that runs a step after the same context."""
    shape, num_rows = model.skeleton.kv_shape(), context + max(nodes)
    slot = KVSlot(shape, 0, CPU)
    slot.place(shape.empty(kv_bytes // shape.row_bytes, CPU), 0, num_rows)  # placed like a slot in a worker's arena
    tokens = np.random.default_rng(1).integers(0, model.skeleton.vocab_size, context).tolist()
    model.logits(Batch([Segment.context(slot, 0, tokens)], None, CPU))

    def step(num_nodes: int) -> Callable[[], object]:
        tree = frontier(num_nodes, num_nodes)
        return lambda: model.logits(Batch([Segment.tree(slot, context, tree)], None, CPU))

    return {num_nodes: step(num_nodes) for num_nodes in nodes}


def reads(num_bytes: int) -> dict[str, Callable[[], object]]:
    """Functions that read `num_bytes` bytes, and half of them."""
    large = torch.frombuffer(large_pages(num_bytes // 4 * 4), dtype=torch.float32).fill_(1)
    small, half = torch.ones(num_bytes // 4), large[: len(large) // 2]
    return {"read": large.sum, "read in small pages": small.sum, "read of half": half.sum}


class Measured(NamedTuple):
    """Seconds of reads and steps, by turn."""

    num_bytes: int  # of the weights in the checkpoint's type
    models: dict[str, str]  # description by bits of the products
    own_reads: dict[str, str]  # name of the read with as many bytes as a step reads
    nodes: Sequence[int]
    seconds: dict[str, list[float]]

    def milliseconds(self) -> dict[str, float]:
        """Median milliseconds of each."""
        return {name: 1e3 * statistics.median(times) for name, times in self.seconds.items()}

    def ratios(
        self, bits: str, read: str = "read", of: Callable[[list[float]], float] = statistics.median
    ) -> dict[str, float]:
        """Ratios of steps to a read, by number of nodes."""
        steps = {nodes: of(self.seconds[name_of(bits, nodes)]) for nodes in self.nodes}
        return {str(nodes): round(step / of(self.seconds[read]), 3) for nodes, step in steps.items()}


def measure(
    models: dict[str, ResidentModel], nodes: Sequence[int], turns: int, context: int = 200, kv_bytes: int = 2 * 10**9
) -> Measured:
    """Measure models, by bits of their products; the KV arena has `kv_bytes`, as in a worker."""
    num_bytes = max(map(weight_bytes, models.values()))
    parts = reads(num_bytes)
    for bits, model in models.items():
        own = steps(model, kv_bytes, context, nodes)
        parts |= {name_of(bits, num_nodes): step for num_nodes, step in own.items()}
    for part in parts.values():
        part()  # compiles kernels and allocates buffers
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(turns):
        for name, part in parts.items():
            seconds[name].append(timed(part))
    descriptions = {bits: model.describe() for bits, model in models.items()}
    own_reads = {bits: "read of half" if model.is_int8 else "read" for bits, model in models.items()}
    return Measured(num_bytes, descriptions, own_reads, nodes, seconds)


def name_of(bits: str, nodes: int) -> str:
    """Name of a step in tables."""
    return f"{nodes} nodes in {bits} bits"


def tell(measured: Measured) -> None:
    """Print a table."""
    ms = measured.milliseconds()
    print(
        f"{measured.num_bytes / 1e6:.0f} MB of weights, read in {ms['read']:.1f} ms; half in {ms['read of half']:.1f}"
    )
    print(f"{'bits':>4} {'nodes':>5} {'ms':>7} {'quartiles':>15} {'ratio':>6}")
    for bits, nodes in itertools.product(measured.models, measured.nodes):
        times = measured.seconds[name_of(bits, nodes)]
        low, middle, high = (1e3 * second for second in statistics.quantiles(times, n=4))
        print(f"{bits:>4} {nodes:>5} {middle:7.1f} {low:7.1f}-{high:.1f} {middle / ms['read']:6.2f}")


def figures(measured: Measured) -> dict[str, object]:
    """The figures of the JSON line."""
    return {
        "draft_step_ratio": {bits: measured.ratios(bits) for bits in measured.models},
        "ratio_of_fastest": {bits: measured.ratios(bits, of=min) for bits in measured.models},
        "ratio_to_own_read": {bits: measured.ratios(bits, measured.own_reads[bits]) for bits in measured.models},
        "milliseconds": {name: round(value, 2) for name, value in measured.milliseconds().items()},
        "weight_bytes": measured.num_bytes,
        "models": measured.models,
    }


def main() -> None:
    """Print a table and one JSON line."""
    parser = FlagParser(description=__doc__)
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
    parser.add_argument("--bits", nargs="+", choices=DRAFT_BITS, default=["16", "8"], help="of products")
    arguments = parser.parse_args()
    if arguments.model is None:
        ensure_demonstration(0)
    checkpoint = Checkpoint.open(str(arguments.model or demonstration_folder(0)))
    compute_with(arguments.threads)
    drops = parse_layers(arguments.drop_layers)
    models = {bits: load_draft(checkpoint, drops, arguments.dtype, CPU, bits=bits) for bits in arguments.bits}
    measured = measure(models, arguments.nodes, arguments.turns, arguments.context, arguments.kv_memory)
    tell(measured)
    settings = {"context": arguments.context, "turns": arguments.turns, "threads": arguments.threads}
    print(json.dumps(figures(measured) | settings | {"processor": processor()}))


if __name__ == "__main__":
    main()
