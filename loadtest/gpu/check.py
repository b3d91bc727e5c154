"""Proves the path over a GPU where there is one: exact, within its memory, and as fast as the link.

    python -m loadtest.gpu [--layers 80] [--device-memory 24GB]

A random Llama of 70B's shape streams from pinned memory, in 16 and in 4 bits; a small one is compared with plain
decoding bit for bit, and a mixture whose experts come when they are chosen with one whose layers come whole; drafts of
1B's and 8B's shapes are timed; layers and a draft are tried on a second GPU, where there is one; the trees that are
worth most by published acceptance are swept; and the demonstration runs with all its processes. Takes minutes and up to
the host's memory; ends with tables and one JSON line. Exit status 2 where there is no GPU, 1 where something did not
hold. `--dry-run-on-cpu` does everything in miniature on the CPU, so that the check itself can be checked: its figures
mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bough.config.flag_parser import FlagParser
from bough.config.parsers import parse_bytes
from bough.model.gpu.ready import make_ready
from bough.runtime.machine import default_budget, free_memory
from loadtest.gpu import parts as gpu_parts
from loadtest.gpu.contexts import contexts
from loadtest.gpu.copying import bandwidth, pinning
from loadtest.gpu.experts import experts
from loadtest.gpu.layer_bits import layer_bits
from loadtest.gpu.pipeline import pipeline
from loadtest.gpu.random_models import Machine
from loadtest.gpu.second_gpu import second_gpu
from loadtest.gpu.sizes import MINIATURE, REAL, Sizes
from loadtest.gpu.tables import table
from loadtest.gpu.target_sweeps import big_model, new_lanes, release, write_big
from loadtest.gpu.unpacking import unpacking

LEAST_EFFICIENCY = 0.9  # of a sweep of the smallest tree: the link's own time, of all its time
RAM_DISK = Path("/dev/shm")


def check(device: torch.device, sizes: Sizes, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, in an order in which what is most likely to fail comes first."""
    machine, second = Machine(device, new_lanes(device), arguments.device_memory, 0, 1), _second(device)
    report: dict[str, Any] = {"device": gpu_parts.describe(device), "attention": gpu_parts.attention(device)}
    report["unpacking"] = unpacking(device, *sizes.unpacked)
    report["layer_bits"] = layer_bits(device, sizes.matrices, machine.rows, torch.bfloat16)
    report["contexts"] = contexts(device, *sizes.contexts)
    report["equality"] = gpu_parts.equality(machine, sizes.small, sizes.num_compared, folder / "small", new_lanes)
    if second is not None:
        report["second_gpu"] = second_gpu(machine, second, sizes.small, folder / "second", new_lanes)
    report["experts"] = experts(device, sizes.mixture, folder / "mixture", new_lanes)
    report |= _drafts(device, second, sizes, folder)
    rate = bandwidth(new_lanes(device), sizes.copy_bytes)
    report["pinning"] = pinning(new_lanes(device), sizes.copy_bytes)
    report["host_to_device_gb_s"] = round(rate / 1e9, 2)
    print(report, flush=True)
    sources = write_big(sizes.target, folder / "target", device)  # before the host's memory is counted: it may be there
    host = arguments.host_memory or default_budget(free_memory())
    machine = replace(machine, host_memory=host, max_resident=sizes.max_resident)
    step_seconds = _step_seconds(report["draft"])
    report |= big_model(sources, machine, sizes, folder / "target", arguments.layers, rate, step_seconds)
    report["pipeline"] = pipeline(device)
    report["ok"] = _holds(report, on_gpu=device.type != "cpu")
    return report


def _second(device: torch.device) -> torch.device | None:
    """Another GPU; None where there is none. On the CPU that it is tried on, it stands for its own neighbour."""
    if device.type == "cpu":
        return device
    return torch.device("cuda", 1) if torch.cuda.device_count() > 1 else None


def _drafts(device: torch.device, second: torch.device | None, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Steps of every draft, and of the first one on another GPU."""
    rows = []
    for place in dict.fromkeys((device, second)):
        for name, config in sizes.drafts.items() if place == device else [*sizes.drafts.items()][:1]:
            if place is not None:
                steps = gpu_parts.draft_steps(place, config, folder / f"draft {name} {place.index}")
                rows += [{"draft": name, "on": str(place), **row} for row in steps]
                gc.collect()
                release(place)
    return {"draft": rows}


def _step_seconds(drafts: Sequence[Mapping[str, Any]]) -> float:
    """Of the last draft, for 16 rows of one session."""
    row = [row for row in drafts if tuple(row["rows"]) == (16,) and row["on"] == drafts[0]["on"]][-1]
    return float(row["graph_ms"] or row["eager_ms"]) / 1e3


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
        and report["pipeline"]["is_same"]
        and report.get("second_gpu", {"is_close": True})["is_close"]
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
    parser = FlagParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=80, help="of the target; fewer where memory holds fewer")
    parser.add_argument("--device-memory", type=parse_bytes, default=24 * 1000**3, help="that the target may take")
    parser.add_argument("--host-memory", type=parse_bytes, default=0, help="for layers; 0 takes most of what is free")
    parser.add_argument("--folder", type=Path, help="for the models; memory where it has room by default")
    parser.add_argument("--dry-run-on-cpu", action="store_true", help="in miniature, to try the check itself")
    return parser.parse_args()
