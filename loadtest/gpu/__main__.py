"""Checks the GPU path on a machine with a GPU: exactness, memory limits, and speed relative to the link.

    python -m loadtest.gpu [--layers 80] [--device-memory 24GB] [--report FILE]

A random Llama with a 70B's shape streams from pinned memory, in 4 and in 16 bits. Small models are compared with plain
decoding bit for bit, and a mixture that reads experts on demand with one that reads whole layers. Drafts with the
shapes of a 1B and an 8B are timed. Layers and a draft run on a second GPU, if there is one. The trees that the
orchestrator's sizer chooses for published acceptance are swept, and the demonstration runs with all its processes.

The check installs nothing. It needs what a target worker and `bough plan` need, with torch for CUDA and a C compiler,
and takes most of the free host memory. It ends within `--seconds`, with tables and one JSON line. A part that fails,
hangs or ends its process is listed under `failed`; its partial results and the other parts' are kept. One that this
machine cannot run is listed under `skipped`. All parts first run in miniature. Then the most
informative ones come first. `--report` is rewritten whenever there are more figures. The exit status is 2 without a
GPU, and 1 if a check failed. `--dry-run-on-cpu` tests the check itself in miniature; its figures mean nothing.
`carry.sh` collects what a machine without a network needs.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bough.config.flag_parser import FlagParser
from bough.config.parsers import parse_bytes
from loadtest.gpu.sizes import MINIATURE, REAL, Sizes
from loadtest.gpu.supervised import is_outcome, results_of
from loadtest.gpu.work import WORK

PARTS = (
    "products",
    "unpacking",
    "contexts",
    "recurrence",
    "draft",
    "sweeps",
    "chosen",
    "memory",
    "profile",
)  # parts whose results are rows


def table(report: Mapping[str, Any]) -> str:
    """A Markdown table for each part with rows."""
    return "\n\n".join(
        f"**{part}** on {report.get('device', 'an unknown GPU')}\n\n{_rows(report[part])}"
        for part in PARTS
        if report.get(part)
    )


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([_cell(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {number}" for key, number in value.items())
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


LEAST_EFFICIENCY = 0.9  # least share of the link's own time in a sweep of the smallest tree
SECONDS = 510.0
RAM_DISK = Path("/dev/shm")


def check(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all parts; returns their figures and whether all checks hold."""
    flags = [
        f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in ("layers", "device-memory", "host-memory")
    ]
    flags += ["--dry-run-on-cpu"] if arguments.dry_run_on_cpu else []

    def command(parts: Sequence[str], found: dict[str, Any]) -> list[str]:
        (folder / "found.json").write_text(json.dumps(found))
        modules = "bough.model.architecture.light_imports", "loadtest.gpu.work"  # imports as a worker does
        return [sys.executable, "-m", *modules, f"--parts={','.join(parts)}", f"--folder={folder}", *flags]

    wanted = [part for part in WORK if not arguments.parts or part.name in arguments.parts.split(",")]
    seconds = arguments.seconds
    if arguments.dry_run_on_cpu:  # times are meaningless there
        wanted, seconds = [part._replace(seconds=math.inf) for part in wanted], math.inf

    def report_of(found: dict[str, Any], failed: dict[str, str]) -> dict[str, Any]:
        report = merged(found) | {"layers_asked": arguments.layers, "failed": failed}
        report["skipped"] = {name: value["skipped"] for name, value in found.items() if is_outcome(value, "skipped")}
        is_right = holds(report, on_gpu=not arguments.dry_run_on_cpu) and holds(merged(found.get("smoke", {})), False)
        return report | {"ok": not failed and is_right}

    def note(found: dict[str, Any], failed: dict[str, str]) -> None:
        write(arguments.report, report_of(found, failed) | {"is_cut_off": True})

    return report_of(*results_of(wanted, command, seconds, note))


def write(file: Path | None, report: Mapping[str, Any]) -> None:
    """Replace the report's file, if one is wanted."""
    if file is not None:
        part = file.with_suffix(".part")
        part.write_text(json.dumps(report))
        part.rename(file)


def merged(found: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the results by subject of the parts that ran."""
    report: dict[str, Any] = {}
    for name, value in found.items():
        if is_outcome(value, "skipped") or is_outcome(value, "error"):
            continue
        has_subjects = name in ("device", "copying") or name.startswith("target ")
        for subject, figures in value.items() if has_subjects else [(name, value)]:
            report[subject] = report.get(subject, []) + figures if isinstance(figures, list) else figures
    return report


def holds(report: Mapping[str, Any], on_gpu: bool) -> bool:
    """Whether all checks hold; speed is checked only if the smallest trees are bound by the link."""
    counted = [row for part in ("products", "equality", "families") for row in report.get(part, [])]
    counted += [report[name] for name in ("layer_bits", "experts") if name in report]
    close = [report[name] for name in ("attention", "second_gpu") if name in report]
    close += [row for part in ("equality", "families", "recurrence", "draft") for row in report.get(part, [])]
    is_right = (
        all(case["equal"] == case["compared"] for case in counted)
        and all(row["is_close"] for row in close)
        and all(row["is_equal"] for row in report.get("unpacking", []))
        and all(memory["is_within"] for memory in report.get("memory", []))
        and report.get("pipeline", {"is_same": True})["is_same"]
    )
    rows = report.get("sweeps", [])
    smallest = min((row["tokens"] for row in rows), default=0)
    is_fast = (
        all(row["link_efficiency"] >= LEAST_EFFICIENCY for row in rows if row["tokens"] == smallest and row["link_gb"])
        and all(memory["unpinned_gb"] == 0 for memory in report.get("memory", []))
        and all(row["graph_ms"] is not None for row in report.get("draft", []))
    )
    return bool(is_right and (is_fast or not on_gpu))


def main(line: Sequence[str] | None = None) -> None:
    """Print results as they come, and one JSON line."""
    arguments = _arguments(line)
    if not arguments.dry_run_on_cpu and not torch.cuda.is_available():
        print("error: torch finds no GPU; --dry-run-on-cpu tests the check itself in miniature", file=sys.stderr)
        raise SystemExit(2)
    if find_spec("simpy") is None:
        print("error: the package simpy is missing; pip install '.[worker,plan]'", file=sys.stderr)
        raise SystemExit(2)
    sizes = MINIATURE if arguments.dry_run_on_cpu else REAL
    began = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which removes the folder
    if arguments.folder is not None and not arguments.folder.is_dir():
        raise SystemExit(f"error: --folder must be a folder that exists, got {str(arguments.folder)!r}")
    folder = Path(tempfile.mkdtemp(prefix="bough-gpu-check-", dir=arguments.folder or _roomy(sizes)))
    try:
        report = check(folder, arguments)
    finally:
        shutil.rmtree(folder)
    print(table(report))
    report |= {"is_dry_run": arguments.dry_run_on_cpu, "seconds": round(time.perf_counter() - began, 1)}
    write(arguments.report, report)
    print(json.dumps(report))
    raise SystemExit(0 if report["ok"] else 1)


def _roomy(sizes: Sizes) -> Path | None:
    """A folder in memory if there is enough for a few gigabytes, else the default temporary folder."""
    needed = 12 * sizes.target.hidden_size * (3 * sizes.target.intermediate_size + sizes.target.vocab_size)
    is_roomy = RAM_DISK.is_dir() and shutil.disk_usage(RAM_DISK).free > needed
    return RAM_DISK if is_roomy else None


def _arguments(line: Sequence[str] | None) -> argparse.Namespace:
    parser = FlagParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=80, help="layers of the target, as far as memory holds")
    parser.add_argument("--device-memory", type=parse_bytes, default=24 * 1000**3, help="limit of the GPU memory")
    parser.add_argument("--host-memory", type=parse_bytes, default=0, help="host memory for layers; 0 is most of it")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit; parts left then do not run")
    parser.add_argument("--parts", default="", help=f"of {', '.join(part.name for part in WORK)} (default: all)")
    parser.add_argument("--folder", type=Path, help="folder for models (default: in memory, if there is room)")
    parser.add_argument("--report", type=Path, help="file for the report, rewritten as results come")
    parser.add_argument("--dry-run-on-cpu", action="store_true", help="test the check itself in miniature")
    arguments = parser.parse_args(line)
    unknown = set(filter(None, arguments.parts.split(","))) - {part.name for part in WORK}
    if unknown:
        parser.error(f"--parts must be of {', '.join(part.name for part in WORK)}, got {', '.join(sorted(unknown))}")
    if arguments.report and not arguments.report.parent.is_dir():
        parser.error(f"--report must be in a folder that exists, got {arguments.report}")
    return arguments


if __name__ == "__main__":
    main()
