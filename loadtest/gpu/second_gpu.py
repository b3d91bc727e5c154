"""Layers on a second GPU, against all of them on one; part of `python -m loadtest.gpu`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from bough.model.batch.batch import Batch, Segment
from bough.model.kv.kv_arena import KVArena
from bough.model.kv.split_layers import split_memory
from bough.model.loading.loading import build_skeleton
from bough.trees.tree import Tree
from loadtest.gpu.parts import describe
from loadtest.gpu.random_models import Machine, planned, repeated, streamed, write_random
from target_worker.link.streams import DeviceStreams

NUM_ROWS, NODES, REPEATS = 64, 24, 10
CLOSE = 0.05  # of the largest logit: other kinds of GPUs sum in other orders


def second_gpu(
    machine: Machine,
    second: torch.device,
    config: LlamaConfig,
    folder: Path,
    new_lanes: Callable[[torch.device], DeviceStreams],
) -> dict[str, Any]:
    """Logits of a tree with every other layer there, against all of them on the first; and what a sweep takes."""
    checkpoint = write_random(folder / "written", config, machine.device)
    checkpoint = repeated(checkpoint, config.num_hidden_layers, folder / "read")
    layer_bytes = max(layer.num_bytes for layer in planned(build_skeleton(checkpoint, torch.bfloat16)))
    every_other = dict.fromkeys(range(1, config.num_hidden_layers, 2), second)
    found = []
    for elsewhere in ({}, every_other):
        host = (config.num_hidden_layers + 2) * layer_bytes
        small = replace(machine, host_memory=host, lanes=new_lanes(machine.device))
        with streamed(checkpoint, small, NUM_ROWS, elsewhere=elsewhere) as model:
            shape = model.skeleton.kv_shape()
            arena = KVArena(shape, split_memory(shape, NUM_ROWS, machine.device, elsewhere))
            tree = Tree.of([*range(NODES)], [-1, *(max(0, node - 3) for node in range(1, NODES))], [0.0] * NODES)
            batch = Batch([Segment.tree(arena.take(NUM_ROWS), 0, tree)], model.rows, model.device)
            logits = model.sweep(batch)[0].cpu().clone()
            began = time.perf_counter()
            for _ in range(REPEATS):
                model.sweep(batch)
            found.append((logits, (time.perf_counter() - began) / REPEATS))
    (alone, alone_seconds), (both, both_seconds) = found
    difference, largest = float((both - alone).abs().max()), float(alone.abs().max())
    return {
        "second": describe(second),
        "layers_there": len(every_other),
        "is_equal": torch.equal(alone, both),
        "is_close": difference <= CLOSE * largest,
        "sweep_ms": [round(1e3 * seconds, 3) for seconds in (alone_seconds, both_seconds)],
    }
