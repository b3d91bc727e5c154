"""Time by kernel of a sweep over one resident and one streamed layer; part of `loadtest.gpu`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.profiler import profile

from bough.model.checkpoint.checkpoint import Checkpoint
from loadtest.gpu.random_models import Machine, repeated, streamed
from loadtest.gpu.target_sweeps import CONTEXT, Sweeps, random_tree

MOST = 20  # kernels or operators of each sweep that are reported, the longest ones


def layer_profile(source: Checkpoint, machine: Machine, trees: Sequence[int], folder: Path) -> list[dict[str, Any]]:
    """Milliseconds and calls by kernel, and by operator on the host, after the whole sweep of each tree."""
    rows, num_rows = [], CONTEXT + max(trees)
    machine = replace(machine, max_resident=1)
    with streamed(repeated(source, 2, folder), machine, num_rows) as model:
        sweeps = Sweeps(model, num_rows)
        for size in trees:
            batch = sweeps.batch(random_tree(size, model.skeleton.vocab_size))
            model.sweep(batch)  # compiles kernels
            with profile() as profiled:
                began = time.perf_counter()
                model.sweep(batch)
                ms = (time.perf_counter() - began) * 1e3
            found = [_row(size, event) for event in profiled.key_averages()]
            rows.append({"tokens": size, "on": "both", "what": "the sweep", "calls": 1, "ms": round(ms, 3)})
            rows += sorted(found, key=lambda row: -row["ms"])[:MOST]
    return rows


def _row(size: int, event: Any) -> dict[str, Any]:
    on_host = event.device_type.name == "CPU"
    us = event.self_cpu_time_total if on_host else event.self_device_time_total
    where = "host" if on_host else "GPU"
    return {"tokens": size, "on": where, "what": event.key[:100], "calls": event.count, "ms": round(us / 1e3, 3)}
