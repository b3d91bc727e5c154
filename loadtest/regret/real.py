"""Measures regret with the demonstration models: streamed, resident, throttled, crowded and disturbed.

Each regime is measured in its own process (`loadtest.regret.real_regime`), which a control group may slow down.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bough.config.cache_paths import SUBSTITUTE_DROPS, cache_folder
from bough.processes.exit_with_parent import start
from loadtest.common.limits import limited
from loadtest.regret.scoring import geomean, interval, score

MEGABYTE = 1000**2
GRID = ((4, 3), (8, 5), (16, 6), (32, 7), (64, 8))  # nodes, depth
WIDE_GRID = ((8, 5), (16, 6), (64, 8), (128, 12), (256, 14))
STREAMED = ("--resident-layers", "0")


@dataclass(frozen=True, slots=True)
class RealRegime:
    """Settings of a run of the demonstration models."""

    name: str
    target_flags: tuple[str, ...] = STREAMED
    draft_flags: tuple[str, ...] = ("--drop-layers", SUBSTITUTE_DROPS)
    temperature: float = 0.0
    num_sessions: int = 1
    read_megabytes_per_second: int = 0  # disk limit; 0 is none
    grid: tuple[tuple[int, int], ...] = GRID
    is_disturbed: bool = False  # whether another process uses a processor from the middle of every answer


REGIMES = (
    RealRegime("demonstration, greedy"),
    RealRegime("demonstration, temperature 0.8", temperature=0.8),
    RealRegime("everything resident", target_flags=(), grid=GRID),
    RealRegime("link throttled to 500 MB/s", read_megabytes_per_second=500, grid=WIDE_GRID),
    RealRegime("hostile draft", draft_flags=("--drop-layers", "1-28")),
    RealRegime("four sessions", num_sessions=4),
    RealRegime("demonstration, disturbed", is_disturbed=True),
    RealRegime("everything resident, disturbed", target_flags=(), is_disturbed=True),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run of each regime."""

    num_prompts: int
    num_tokens: int
    plain_tokens: int
    more_prompts: int  # that only the sizer answers, to judge its predictions by more rounds
    seed: int


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a regime's process."""

    regime: RealRegime
    scale: Scale


@dataclass(frozen=True, slots=True)
class Measured:
    """A regime's result: seconds per token after the first round, by contestant and prompt."""

    self_sized: tuple[float, ...]
    fixed: dict[str, tuple[float, ...]]
    plain: tuple[float, ...]
    num_unequal: int  # texts that differ from plain decoding, as far as that was run
    sizes: tuple[int, ...]  # nodes of self-sized trees, without each answer's first round
    round_time_error: float
    token_error: float
    facts: dict[str, Any] = field(default_factory=dict)


def run(scale: Scale, names: Sequence[str]) -> dict[str, Any]:
    """Run all regimes, or those named, and return their figures."""
    figures = {}
    for regime in REGIMES:
        if names and regime.name not in names:
            continue
        try:
            measured = _measure(Task(regime, scale))
        except (OSError, subprocess.SubprocessError) as exc:
            print(f"{regime.name}: could not be measured: {exc}", file=sys.stderr, flush=True)
            figures[regime.name] = {"not_measured": str(exc)}
            continue
        figures[regime.name] = _figures(measured)
        print(f"{regime.name}: {json.dumps(figures[regime.name])}", file=sys.stderr, flush=True)
    return _summary(figures)


def _measure(task: Task) -> Measured:
    speed = task.regime.read_megabytes_per_second * MEGABYTE
    if not speed:
        return _answer(task)
    with limited(read_bytes_per_second=speed, disk_of=cache_folder()) as prefix:
        return _answer(task, prefix)


def _answer(task: Task, prefix: Sequence[str] = ()) -> Measured:
    command = [sys.executable, "-m", "loadtest.regret.real_regime", json.dumps(asdict(task))]
    with start(command, lambda line: subprocess.Popen([*prefix, *line], stdout=subprocess.PIPE)) as process:
        output = process.communicate()[0].decode()
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    values: dict[str, Any] = json.loads(output.splitlines()[-1])
    values["fixed"] = {name: tuple(seconds) for name, seconds in values["fixed"].items()}
    return Measured(**values | {name: tuple(values[name]) for name in ("self_sized", "plain", "sizes")})


def _figures(measured: Measured) -> dict[str, Any]:
    scored = score(measured.self_sized, {"off": measured.plain, **measured.fixed}, measured.plain)
    sizes = sorted(measured.sizes)
    return {
        "ratio": round(scored.ratio, 3),
        "interval": (round(scored.low, 3), round(scored.high, 3)),
        "best_fixed": scored.best_fixed,
        "best_fixed_tokens_per_second": round(1 / scored.best_fixed_seconds, 3),
        "plain_ratio": round(scored.plain_ratio, 3),
        "self_tokens_per_second": round(1 / geomean(measured.self_sized), 3),
        "plain_tokens_per_second": round(1 / geomean(measured.plain), 3),
        "fixed_tokens_per_second": {name: round(1 / geomean(s), 3) for name, s in measured.fixed.items()},
        "nodes": sizes[len(sizes) // 2] if sizes else 1,
        "most_nodes": sizes[-1] if sizes else 1,
        "round_time_error": round(measured.round_time_error, 3),
        "token_error": round(measured.token_error, 3),
        "unequal": measured.num_unequal,
        "plain_interval": [
            round(bound, 3)
            for bound in interval([math.log(p / s) for p, s in zip(measured.plain, measured.self_sized, strict=True)])
        ],
        **measured.facts,
    }


def _summary(figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    ratios = {name: each["ratio"] for name, each in figures.items() if "ratio" in each}
    if not ratios:
        return {"regimes": {}, "details": figures}
    return {
        "geomean": round(geomean(list(ratios.values())), 4),
        "worst": min(ratios.values()),
        "regimes": ratios,
        "plain": {name: figures[name]["plain_ratio"] for name in ratios},
        "details": figures,
    }
