"""Proves the path over a GPU where there is one: exact, within its memory, and as fast as the link.

    python -m loadtest.gpu [--layers 80] [--device-memory 24GB]

A random Llama of 70B's shape streams from pinned memory, in 16 and in 4 bits; a small one is compared with plain
decoding bit for bit, and a mixture whose experts come when they are chosen with one whose layers come whole; a draft of
1B's shape is timed. Takes minutes and up to the host's memory; ends with one JSON line. Exit status 2 where there is no
GPU, 1 where something did not hold. `--dry-run-on-cpu` does everything in miniature on the CPU, so that the check
itself can be checked: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from bough.config.parsers import parse_bytes
from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.gpu.ready import make_ready
from bough.model.kv.session_kv import KVSlot
from bough.model.packing.pack import pack
from bough.runtime.machine import free_memory, most_of
from bough.sizing.placement import Tier
from bough.trees.tree import Tree
from loadtest.gpu import parts as gpu_parts
from loadtest.gpu.contexts import contexts
from loadtest.gpu.copying import bandwidth, pinning
from loadtest.gpu.experts import Mixture, experts
from loadtest.gpu.layer_bits import layer_bits
from loadtest.gpu.random_models import Machine, layers_without_disk, repeated, streamed, write_random
from loadtest.gpu.tables import table
from loadtest.gpu.unpacking import unpacking
from target_worker.link.streams import CudaLanes, InlineLanes, Lanes
from target_worker.sweep.streamed_model import StreamedModel

CONTEXT, REPEATS = 256, 3
LEAST_EFFICIENCY = 0.9  # of a sweep of the smallest tree: the link's own time, of all its time
RAM_DISK = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of everything that is measured."""

    target: LlamaConfig  # of one layer, which all others repeat: only its time is looked at
    max_layers: int
    max_resident: int
    small: LlamaConfig
    num_compared: int  # nodes of a tree, with plain decoding
    mixture: Mixture
    draft: LlamaConfig
    trees: tuple[int, ...]
    copy_bytes: int
    unpacked: tuple[tuple[int, int], tuple[int, int]]  # matrices (outputs, inputs) that are compared, and timed
    matrices: tuple[tuple[int, int], ...]  # of a layer whose rows' bits are compared
    contexts: tuple[tuple[int, ...], tuple[int, ...]]  # rows and lengths that attention is timed with


def _llama(hidden: int, intermediate: int, heads: int, kv_heads: int, layers: int, vocab: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=layers,
        vocab_size=vocab,
        max_position_embeddings=4096,
    )


REAL = Sizes(
    target=_llama(8192, 28672, 64, 8, 1, 128_256),
    max_layers=1000,
    max_resident=1000,
    small=_llama(1024, 2816, 16, 4, 6, 4096),
    num_compared=40,
    mixture=Mixture(layers=8, experts=64, chosen=8),
    draft=_llama(2048, 8192, 32, 8, 16, 128_256),
    trees=(1, 64, 256, 512),
    copy_bytes=1 << 30,
    unpacked=((4096, 2048), (28672, 8192)),
    matrices=((8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672)),
    contexts=((64, 256, 768), (1024, 4096, 8192)),
)
_TINY = (64, 96, 4, 2)
MINIATURE = Sizes(
    target=_llama(*_TINY, 1, 256),
    max_layers=5,
    max_resident=2,
    small=_llama(*_TINY, 6, 256),
    num_compared=3,
    mixture=Mixture(layers=7, experts=8, chosen=2),
    draft=_llama(*_TINY, 2, 256),
    trees=(1, 8),
    copy_bytes=1 << 20,
    unpacked=((256, 128), (256, 128)),
    matrices=((64, 64),),
    contexts=((4,), (32,)),
)


def random_tree(size: int, vocab_size: int, seed: int = 0) -> Tree:
    """Every node below one of the six before it."""
    rng = np.random.default_rng(seed)
    parents = [-1] + [int(rng.integers(max(0, node - 6), node)) for node in range(1, size)]
    return Tree.of([node % vocab_size for node in range(size)], parents, [0.0] * size)


def new_lanes(device: torch.device) -> Lanes:
    """Of the GPU; on the CPU, lanes that stand for one."""
    return InlineLanes() if device.type == "cpu" else CudaLanes(device)


def sweeps(model: StreamedModel, sizes: Sizes, num_rows: int, bits: int, rate: float) -> list[dict[str, Any]]:
    """Time of a sweep by its tokens, several in a row, against the time that its bytes need at `rate` per second."""
    slot = KVSlot(model.skeleton.kv_shape(), num_rows, model.device)
    vocab_size = model.skeleton.vocab_size
    context = [token % vocab_size for token in range(CONTEXT)]
    model.sweep(Batch([Segment.context(slot, 0, context)], model.rows, model.device))
    slot.compact(range(CONTEXT), context)
    placement, rows = model.tiers.placement, []
    ideal = placement.link_bytes / rate
    for size in sizes.trees:
        batch = Batch([Segment.tree(slot, CONTEXT, random_tree(size, vocab_size))], model.rows, model.device)
        model.sweep(batch)  # kernels are compiled, and the ring is as ahead as it will be
        began = time.perf_counter()
        figures = [model.sweep(batch)[1] for _ in range(REPEATS)]
        seconds = (time.perf_counter() - began) / REPEATS
        row = {
            "bits": bits,
            "tokens": size,
            "layers": {tier.value: len(placement.layers(tier)) for tier in Tier},
            "link_gb": round(placement.link_bytes / 1e9, 3),
            "seconds": round(seconds, 4),
            "ideal_seconds": round(ideal, 4),
            "link_efficiency": round(ideal / seconds, 3),
            "waiting_for_layers_seconds": round(sum(f.wait_ns for f in figures) / REPEATS / 1e9, 4),
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def write_big(config: LlamaConfig, folder: Path, device: torch.device) -> dict[int, Checkpoint]:
    """The one layer of the 70B-shaped target in 16 and in 4 bits."""
    write_random(folder / "16", config, device)
    pack(str(folder / "16"), 4, folder / "4")
    return {bits: Checkpoint.open(folder / str(bits)) for bits in (16, 4)}


def big_model(
    sources: dict[int, Checkpoint], machine: Machine, sizes: Sizes, folder: Path, num_asked: int, rate: float
) -> dict[str, Any]:
    """Sweeps of the target with as many layers as the two memories hold."""
    rows, memory, num_rows = [], [], CONTEXT + max(sizes.trees)
    for bits, source in sources.items():
        asked = repeated(source, min(num_asked, sizes.max_layers), folder / f"{bits}-asked")
        num_layers = layers_without_disk(asked, machine, num_rows)
        if num_layers < (wanted := min(num_asked, sizes.max_layers)):
            print(f"{bits} bits: {num_layers} of {wanted} layers, as the two memories hold no more", flush=True)
        if machine.device.type != "cpu":
            all_memory = torch.cuda.get_device_properties(machine.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, machine.device_memory / all_memory), machine.device)
            torch.cuda.reset_peak_memory_stats(machine.device)
        fresh = replace(machine, lanes=new_lanes(machine.device))
        with streamed(repeated(source, num_layers, folder / f"{bits}-run"), fresh, num_rows) as model:
            rows += sweeps(model, sizes, num_rows, bits, rate)
            memory.append(_memory(model, machine))
        del model
        gc.collect()  # a host's worth of memory goes before the next model comes
    return {"layers_asked": num_asked, "sweeps": rows, "memory": memory}


def _memory(model: StreamedModel, machine: Machine) -> dict[str, Any]:
    planned = model.tiers.placement.device_bytes
    on_gpu = machine.device.type != "cpu"
    used = torch.cuda.max_memory_allocated(machine.device) if on_gpu else planned
    return {
        "planned_gb": round(planned / 1e9, 3),
        "used_gb": round(used / 1e9, 3),
        "is_within": used <= machine.device_memory,
        "unpinned_gb": round(model.tiers.unpinned_bytes / 1e9, 3),
    }


def check(device: torch.device, sizes: Sizes, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, in an order in which what is most likely to fail comes first."""
    machine = Machine(device, new_lanes(device), arguments.device_memory, 0, 1)
    report: dict[str, Any] = {"device": gpu_parts.describe(device), "attention": gpu_parts.attention(device)}
    report["unpacking"] = unpacking(device, *sizes.unpacked)
    report["layer_bits"] = layer_bits(device, sizes.matrices, machine.rows, torch.bfloat16)
    report["contexts"] = contexts(device, *sizes.contexts)
    report["equality"] = gpu_parts.equality(machine, sizes.small, sizes.num_compared, folder / "small", new_lanes)
    report["experts"] = experts(device, sizes.mixture, folder / "mixture", new_lanes)
    report["draft"] = gpu_parts.draft_steps(device, sizes.draft, folder / "draft")
    rate = bandwidth(new_lanes(device), sizes.copy_bytes)
    report["pinning"] = pinning(new_lanes(device), sizes.copy_bytes)
    report["host_to_device_gb_s"] = round(rate / 1e9, 2)
    print(report, flush=True)
    sources = write_big(sizes.target, folder / "target", device)  # before the host's memory is counted: it may be there
    host = arguments.host_memory or most_of(free_memory())
    machine = replace(machine, host_memory=host, max_resident=sizes.max_resident)
    report |= big_model(sources, machine, sizes, folder / "target", arguments.layers, rate)
    report["ok"] = _holds(report, on_gpu=device.type != "cpu")
    return report


def _holds(report: dict[str, Any], on_gpu: bool) -> bool:
    """Whether all is as it has to be; speed is looked at where the smallest trees leave it to the link."""
    is_right = (
        report["attention"]["is_close"]
        and all(case["equal"] == case["compared"] for case in report["equality"])
        and all(row["is_equal"] for row in report["unpacking"])
        and report["layer_bits"]["equal"] == report["layer_bits"]["compared"]
        and report["experts"]["equal"] == report["experts"]["compared"]
        and all(memory["is_within"] for memory in report["memory"])
        and all(row["is_close"] for row in report["draft"])
    )
    smallest = min(row["tokens"] for row in report["sweeps"])
    speeds = [row["link_efficiency"] for row in report["sweeps"] if row["tokens"] == smallest]
    is_fast = (
        min(speeds) >= LEAST_EFFICIENCY
        and all(memory["unpinned_gb"] == 0 for memory in report["memory"])
        and all(row["graph_ms"] is not None for row in report["draft"])
    )
    return bool(is_right and (is_fast or not on_gpu))


def main() -> None:
    """Prints what it finds as it goes, and one JSON line."""
    arguments = _arguments()
    if not arguments.dry_run_on_cpu and not torch.cuda.is_available():
        print("error: torch finds no GPU here; --dry-run-on-cpu tries the check itself, in miniature", file=sys.stderr)
        raise SystemExit(2)
    device = torch.device("cpu") if arguments.dry_run_on_cpu else torch.device("cuda", 0)
    sizes = MINIATURE if arguments.dry_run_on_cpu else REAL
    make_ready(device)
    began = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="bough-gpu-check-", dir=arguments.folder or _roomy(sizes)))
    try:
        report = check(device, sizes, folder, arguments)
    finally:
        shutil.rmtree(folder)
    print(table(report))
    report |= {"is_dry_run": arguments.dry_run_on_cpu, "seconds": round(time.perf_counter() - began, 1)}
    print(json.dumps(report))
    raise SystemExit(0 if report["ok"] else 1)


def _roomy(sizes: Sizes) -> Path | None:
    """Memory for the few gigabytes of files where there is enough; otherwise the usual place for such."""
    needed = 12 * sizes.target.hidden_size * (3 * sizes.target.intermediate_size + sizes.target.vocab_size)
    is_roomy = RAM_DISK.is_dir() and shutil.disk_usage(RAM_DISK).free > needed
    return RAM_DISK if is_roomy else None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80, help="of the target; fewer where memory holds fewer")
    parser.add_argument("--device-memory", type=parse_bytes, default=24 * 1000**3, help="that the target may take")
    parser.add_argument("--host-memory", type=parse_bytes, default=0, help="for layers; 0 takes most of what is free")
    parser.add_argument("--folder", type=Path, help="for the models; memory where it has room by default")
    parser.add_argument("--dry-run-on-cpu", action="store_true", help="in miniature, to try the check itself")
    return parser.parse_args()
