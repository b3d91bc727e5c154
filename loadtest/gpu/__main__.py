"""Checks the GPU path on a machine with a GPU: exactness, memory limits, and speed relative to the link.

    python -m loadtest.gpu [--layers 80] [--device-memory 24GB] [--report FILE]

A random Llama of 70B's shape streams from pinned memory, in 4 and in 16 bits; a small one is compared with plain
decoding bit for bit, and a mixture whose experts come when they are chosen with one whose layers come whole; drafts of
1B's and 8B's shapes are timed; layers and a draft are tried on a second GPU, where there is one; the trees that the
orchestrator's sizer chooses for published acceptance are swept; and the demonstration runs with all its processes.

Installs nothing: it takes what a target worker and `bough plan` take, with torch for CUDA and a C compiler, and as much
of the host's memory as is free. It ends within `--seconds`, with tables and one JSON line: each part has a time of its
own, and one that fails, hangs or ends its process is told under `failed`, beside what it and the others found. Parts
that tell most come first. A part's figures are printed as JSON when it ends, and with `--report` the whole report is
written anew whenever there is more of it, so that figures are there even if all is stopped. Exit status 2 where there
is no GPU, 1 where something did not hold. `--dry-run-on-cpu` does everything in miniature on the CPU, so that the check
itself can be checked: its figures mean nothing.
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
from loadtest.gpu.supervised import results_of
from loadtest.gpu.work import WORK

PARTS = ("unpacking", "contexts", "recurrence", "draft", "sweeps", "chosen", "memory")  # parts whose results are rows


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
    told = [
        f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in ("layers", "device-memory", "host-memory")
    ]
    told += ["--dry-run-on-cpu"] if arguments.dry_run_on_cpu else []

    def command(parts: Sequence[str], found: dict[str, Any]) -> list[str]:
        (folder / "found.json").write_text(json.dumps(found))
        modules = "bough.model.architecture.light_imports", "loadtest.gpu.work"  # imported as a worker is
        return [sys.executable, "-m", *modules, f"--parts={','.join(parts)}", f"--folder={folder}", *told]

    wanted = [part for part in WORK if not arguments.parts or part.name in arguments.parts.split(",")]
    seconds = arguments.seconds
    if arguments.dry_run_on_cpu:  # times are meaningless there
        wanted, seconds = [part._replace(seconds=math.inf) for part in wanted], math.inf

    def report_of(found: dict[str, Any], failed: dict[str, str]) -> dict[str, Any]:
        report = merged(found) | {"layers_asked": arguments.layers, "failed": failed}
        return report | {"ok": not failed and holds(report, on_gpu=not arguments.dry_run_on_cpu)}

    def note(found: dict[str, Any], failed: dict[str, str]) -> None:
        write(arguments.report, report_of(found, failed) | {"is_cut_off": True})

    return report_of(*results_of(wanted, command, seconds, note))


def write(file: Path | None, report: Mapping[str, Any]) -> None:
    """Write the report, if it is wanted, in place of the one before."""
    if file is not None:
        part = file.with_suffix(".part")
        part.write_text(json.dumps(report))
        part.rename(file)


def merged(found: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the parts' results by subject."""
    report: dict[str, Any] = {}
    for name, value in found.items():
        has_subjects = name in ("device", "copying") or name.startswith("target ")
        for subject, figures in value.items() if has_subjects else [(name, value)]:
            if figures is not None:
                report[subject] = report.get(subject, []) + figures if isinstance(figures, list) else figures
    return report


def holds(report: Mapping[str, Any], on_gpu: bool) -> bool:
    """Whether all checks hold; speed is checked only where the smallest trees are bound by the link."""
    counted = [*report.get("equality", []), *report.get("families", [])]
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


def main() -> None:
    """Print results as they come, and one JSON line."""
    arguments = _arguments()
    if not arguments.dry_run_on_cpu and not torch.cuda.is_available():
        print("error: torch finds no GPU here; --dry-run-on-cpu tries the check itself, in miniature", file=sys.stderr)
        raise SystemExit(2)
    if find_spec("simpy") is None:
        print("error: simpy is missing, in which the sizer is tried; pip install '.[worker,plan]'", file=sys.stderr)
        raise SystemExit(2)
    sizes = MINIATURE if arguments.dry_run_on_cpu else REAL
    began = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it clears up
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


def _arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=80, help="of the target; fewer where memory holds fewer")
    parser.add_argument("--device-memory", type=parse_bytes, default=24 * 1000**3, help="that the target may take")
    parser.add_argument("--host-memory", type=parse_bytes, default=0, help="for layers; 0 takes most of what is free")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="that it may take; parts left then are not begun"
    )
    parser.add_argument("--parts", default="", help=f"of {', '.join(part.name for part in WORK)}; all by default")
    parser.add_argument("--folder", type=Path, help="for the models; memory where it has room by default")
    parser.add_argument("--report", type=Path, help="file for the report, as JSON, from the first part on")
    parser.add_argument("--dry-run-on-cpu", action="store_true", help="in miniature, to try the check itself")
    told = parser.parse_args()
    unknown = set(filter(None, told.parts.split(","))) - {part.name for part in WORK}
    if unknown:
        parser.error(f"--parts must be of {', '.join(part.name for part in WORK)}, got {', '.join(sorted(unknown))}")
    if told.report and not told.report.parent.is_dir():
        parser.error(f"--report must be in a folder that exists, got {told.report}")
    return told


if __name__ == "__main__":
    main()
