"""`bough shape`: finds the best tree shape for acceptance probabilities from a file or a running orchestrator."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from bough.cli.flags.reaching import client_from
from bough.cli.flags.speculation import MOST_NODES
from bough.cli.plots.plotting import require_matplotlib
from bough.cli.plots.shape_plot import save_shape
from bough.errors import ConfigError
from bough.trees.acceptance import Acceptance, FloatArray, acceptance_from, by_depth_and_rank, by_rank
from bough.trees.optimal_tree import (
    best_chains,
    best_shape,
    best_size,
    expected_tokens,
    expected_tokens_of_chains,
    node_values,
)
from bough.trees.tree_plan import Scheme, StaticShape


async def shape(arguments: argparse.Namespace) -> int:
    """Print the shape as one JSON line."""
    _require_sizes(arguments)
    if arguments.plot:
        require_matplotlib("--plot")
    acceptance = await live(arguments) if arguments.from_live else read_acceptance(arguments.vector)
    acceptance = acceptance[:, : arguments.branch]
    levels = min(arguments.levels or arguments.nodes, arguments.nodes)
    began = time.perf_counter()
    if arguments.sweep_seconds:
        sweep_seconds = interpolated(dict(arguments.sweep_seconds), arguments.nodes)
        best, rate = best_size(acceptance, sweep_seconds, arguments.step_seconds, levels)
    else:
        best, rate = best_shape(acceptance, arguments.nodes, levels), None
    seconds = time.perf_counter() - began
    report = described(best, acceptance)
    if rate is not None:
        report["tokens_per_second"] = rate
    if arguments.plot:
        title = (
            f"{best.budget} nodes, {len(report['layer_sizes'])} levels: {report['expected_tokens']:.2f} tokens a round"
        )
        save_shape(best, node_values(best, acceptance), title, "--plot", arguments.plot)
    print(json.dumps({**report, "acceptance": acceptance.tolist(), "search_seconds": seconds}))
    return 0


def described(shape: StaticShape, acceptance: Acceptance) -> dict[str, Any]:
    """The report on a shape, with the best chains of its size."""
    layer_sizes = np.bincount(shape.depths()).tolist()
    report = {
        "expected_tokens": expected_tokens(shape, acceptance),
        "nodes": shape.budget,
        "levels": len(layer_sizes),
        "layer_sizes": layer_sizes,
        "parents": list(shape.parents),
        "chains": None,
    }
    if shape.parents:
        chains = best_chains(acceptance, shape.budget, len(layer_sizes))
        report["chains"] = {**chains._asdict(), "expected_tokens": expected_tokens_of_chains(chains, acceptance)}
    return report


def read_acceptance(file: str) -> Acceptance:
    """Read a JSON list by rank, or a list of lists by depth and rank.

    Raises:
        ConfigError: names the file, and the invalid entry.
    """
    try:
        value = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"--vector: {file} cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:  # not UTF-8, not JSON, or nested too deeply
        raise ConfigError(f"--vector: {file} is no JSON: {exc}") from exc
    return acceptance_from(f"--vector: {file}", value)


async def live(arguments: argparse.Namespace) -> Acceptance:
    """Smoothed acceptance measured by the orchestrator.

    Raises:
        ConfigError: it has no measurements of the scheme.
        Unavailable: it does not answer.
    """
    async with client_from(arguments) as client:
        counted = {one.scheme: one for one in await client.acceptance()}
    scheme = Scheme(arguments.scheme or Scheme.TARGET)
    if scheme not in counted:
        others = ", ".join(one.value for one in counted) or "none"
        raise ConfigError(
            f"--from-live: {arguments.address} has verified no tree by the scheme {scheme.value} yet "
            f"(measured: {others}); generate something first, or use another --scheme"
        )
    return by_depth_and_rank(counted[scheme]) if arguments.by_depth else by_rank(counted[scheme])


def interpolated(measured: dict[int, float], nodes: int) -> FloatArray:
    """(nodes,) seconds of sweeps of 1 node and on, interpolated linearly between measured ones.

    Raises:
        ConfigError: the measured sizes do not cover 1 to `nodes`.
    """
    sizes = sorted(measured)
    if sizes[0] != 1 or sizes[-1] < nodes:
        raise ConfigError(f"--sweep-seconds: must cover 1 to {nodes} nodes (--nodes), got {', '.join(map(str, sizes))}")
    return np.interp(np.arange(1, nodes + 1), sizes, [measured[size] for size in sizes])


def _require_sizes(arguments: argparse.Namespace) -> None:
    """Raises ConfigError naming an invalid flag."""
    for name in ("nodes", "levels", "branch"):
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= MOST_NODES:
            raise ConfigError(f"--{name}: must be 1 to {MOST_NODES}, got {value}")
    if not 0 <= arguments.step_seconds < float("inf"):
        raise ConfigError(f"--step-seconds: must be 0 or more, got {arguments.step_seconds}")
    if arguments.step_seconds and not arguments.sweep_seconds:
        raise ConfigError("--step-seconds: must be given with --sweep-seconds")
    if arguments.by_depth and not arguments.from_live:
        raise ConfigError("--by-depth: must be given with --from-live only")
    if arguments.scheme and not arguments.from_live:
        raise ConfigError(f"--scheme: must be given with --from-live only, got {arguments.scheme}")
    for nodes, seconds in arguments.sweep_seconds:
        if not (nodes >= 1 and 0 < seconds < float("inf")):
            raise ConfigError(f"--sweep-seconds: must be nodes of 1 or more and seconds above 0, got {nodes}={seconds}")
