"""Measures sweeps of a target with a 70B's shape; part of `python -m loadtest.gpu`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from bough.config.processes import TargetConfig, parse
from bough.model.architecture.architecture import load_config, max_positions
from bough.model.backend import backend_of
from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.kv.session_kv import KVSlot
from bough.model.loading.default_settings import settled
from bough.model.running.batch_invariance import product_of
from bough.model.sizes.hardware_probe import matrix_speed, memory_speed
from bough.model.sizes.memory_budget import GPU_SHARE, budgets, whole_device_bytes, with_kv_memory, with_sweep_tokens
from bough.model.sizes.model_sizes import FoundModel, ModelShapes, model_shapes
from bough.sizing.cost_model import MEMORY_SHARE, Speed, Speeds, SweepModel, sweep_model
from bough.sizing.placement import Placement, Tier, place
from bough.trees.tree import Tree
from loadtest.common.inline_streams import InlineStreams
from loadtest.gpu.chosen import SweepSeconds, chosen
from loadtest.gpu.random_models import Machine, repeated, streamed, write_random
from loadtest.gpu.sizes import Sizes
from loadtest.gpu.supervised import Keep
from target_worker.link.streams import CudaStreams, DeviceStreams
from target_worker.sweep.streamed_model import StreamedModel

CONTEXT, REPEATS = 256, 3
LONG_SECONDS = 2.0  # of a sweep that is repeated once


def random_tree(size: int, vocab_size: int, seed: int = 0) -> Tree:
    """A random tree in which each node's parent is one of the six nodes before it."""
    rng = np.random.default_rng(seed)
    parents = [-1] + [int(rng.integers(max(0, node - 6), node)) for node in range(1, size)]
    return Tree.of([node % vocab_size for node in range(size)], parents, [0.0] * size)


def new_streams(device: torch.device) -> DeviceStreams:
    """Streams of a GPU; on the CPU, inline streams."""
    return InlineStreams() if device.type == "cpu" else CudaStreams(device)


class Sweeps:
    """Consecutive sweeps of one model and one session."""

    def __init__(self, model: StreamedModel, num_rows: int) -> None:
        self.model, self._slot = model, KVSlot(model.skeleton.kv_shape(), num_rows, model.device)
        context = [token % model.skeleton.vocab_size for token in range(CONTEXT)]
        model.sweep(Batch([Segment.context(self._slot, 0, context)], model.rows, model.device))
        self._slot.compact(range(CONTEXT), context)

    def seconds(self, tree: Tree) -> float:
        """Seconds of one sweep."""
        return self.timed(tree)[0]

    def batch(self, tree: Tree) -> Batch:
        """The rows of a tree after the session's context."""
        return Batch([Segment.tree(self._slot, CONTEXT, tree)], self.model.rows, self.model.device)

    def timed(self, tree: Tree) -> tuple[float, float]:
        """Seconds of one sweep, and seconds of waiting for layers in it."""
        model, batch = self.model, self.batch(tree)
        first = time.perf_counter()
        model.sweep(batch)  # warm-up: compiles kernels and fills the ring
        began = time.perf_counter()
        repeats = REPEATS if began - first < LONG_SECONDS else 1
        figures = [model.sweep(batch)[1] for _ in range(repeats)]
        seconds = (time.perf_counter() - began) / repeats
        return seconds, sum(f.wait_ns for f in figures) / repeats / 1e9


def sweeps(timed: Sweeps, sizes: Sizes, bits: int, expected: SweepModel, report: Keep) -> list[dict[str, Any]]:
    """Seconds of a sweep by tokens, compared with those of `bough plan`, and with the time of its bytes on the link."""
    placement, rows = timed.model.tiers.placement, []
    ideal = expected.link_seconds
    for size in sizes.trees:
        seconds, waiting = timed.timed(random_tree(size, timed.model.skeleton.vocab_size))
        row = {
            "bits": bits,
            "tokens": size,
            "layers": {tier.value: len(placement.layers(tier)) for tier in Tier},
            "link_gb": round(placement.link_bytes / 1e9, 3),
            "seconds": round(seconds, 4),
            "expected_seconds": round(expected.seconds(size), 4),
            "ideal_seconds": round(ideal, 4),
            "link_efficiency": round(ideal / seconds, 3) if ideal else None,  # nothing streams
            "waiting_for_layers_seconds": round(waiting, 4),
        }
        rows.append(row)
        report({"sweeps": rows})
        print(row, flush=True)
    return rows


def release(device: torch.device) -> None:
    """Free GPU memory that torch has cached."""
    if device.type != "cpu":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def write_big(config: LlamaConfig, folder: Path, device: torch.device, bits: int) -> Checkpoint:
    """Write the one layer of the 70B-shaped target in 16 or 4 bits, unless it exists."""
    path, part = folder / str(bits), folder / f"{bits}.part"
    if not path.exists():
        shutil.rmtree(part, ignore_errors=True)  # left over from a killed process
        write_random(part, config, device, is_packed=bits == 4)
        part.rename(path)
    return Checkpoint.open(path)


def big_model(
    bits: int,
    source: Checkpoint,
    machine: Machine,
    sizes: Sizes,
    folder: Path,
    num_asked: int,
    rate: float,
    step_seconds: float | None,
    report: Keep,
) -> dict[str, Any]:
    """Measure sweeps of the target with as many layers as both memories hold, and of a tree that the sizer chooses.

    The draft takes `step_seconds` for each level of a tree; if that is unknown, no tree is chosen.
    """
    wanted, num_rows = min(num_asked, sizes.max_layers), CONTEXT + max(sizes.trees)
    checkpoint = repeated(source, wanted, folder / f"{bits}-asked")
    shapes, placement = _placed(checkpoint, machine)
    if on_disk := len(placement.layers(Tier.DISK)):
        num_layers = max(1, wanted - on_disk)
        print(f"{bits} bits: {num_layers} of {wanted} layers, as the two memories hold no more", flush=True)
        checkpoint = repeated(source, num_layers, folder / f"{bits}-run")
        shapes, placement = _placed(checkpoint, machine)
    expected = sweep_model(placement, shapes.work, shapes.rows, _speeds(shapes, machine.device, rate))
    with _limited(machine), streamed(checkpoint, machine, num_rows, placement=placement) as model:
        timed = Sweeps(model, num_rows)
        rows, best = sweeps(timed, sizes, bits, expected, report), []
        if step_seconds is not None:
            swept = {row["tokens"]: SweepSeconds(row["seconds"], row["waiting_for_layers_seconds"]) for row in rows}
            text = sizes.text_tokens
            best.append(chosen(bits, len(placement.tiers), swept, model.rows, step_seconds, text, timed.seconds))
        return {"sweeps": rows, "memory": [{"bits": bits, **_memory(model, machine)}], "chosen": best}


def _speeds(shapes: ModelShapes, device: torch.device, rate: float) -> Speeds:
    """The link's `rate`, and what `bough plan` measures; in a dry run on the CPU, only the link means something."""
    link = Speed(rate, "measured")
    if device.type == "cpu":
        return Speeds(Speed(1e12, "made up"), host_link=link)
    product = product_of(shapes.rows, backend_of(device))
    compute = matrix_speed(shapes.matrices, (shapes.rows.most,), shapes.kv.dtype, device, product)
    return Speeds(compute, host_link=link, memory=memory_speed(device).reached(MEMORY_SHARE))


def _placed(checkpoint: Checkpoint, machine: Machine) -> tuple[ModelShapes, Placement]:
    """Sizes of a model, and where a target with this memory would place its layers."""
    found = FoundModel(load_config(checkpoint.path), checkpoint.path, checkpoint)
    flags = [f"--model={checkpoint.path}", f"--resident-layers={machine.max_resident}"]
    settings = settled(parse(TargetConfig, "target_worker", flags, {}), found.config, machine.device.type)
    shapes = model_shapes(found, "bfloat16", 0, settings.rows, machine.device.type)
    memory = machine.device_memory, machine.host_memory
    settings = with_sweep_tokens(settings, found.config, shapes.kv, machine.device_memory)
    settings = with_kv_memory(settings, shapes.kv, max_positions(found.config), *memory)
    allowed = budgets(settings, shapes.layer_bytes, *memory)
    return shapes, place(shapes.layer_bytes, shapes.fixed(settings, is_gpu=True), allowed)


@contextmanager
def _limited(machine: Machine) -> Iterator[None]:
    """Let torch have no more of the GPU within the block than a card of that size has."""
    if machine.device.type == "cpu":
        yield
        return
    share = machine.device_memory / GPU_SHARE / whole_device_bytes(machine.device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), machine.device)
    torch.cuda.reset_peak_memory_stats(machine.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, machine.device)


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
