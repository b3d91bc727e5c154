"""`bough shape`: finds the best tree shape for acceptance probabilities from a file or a running orchestrator."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from bough.cli.flags.reaching import client_from
from bough.cli.flags.requests import read_json
from bough.errors import ConfigError
from bough.trees.acceptance import Acceptance, acceptance_from, by_depth_and_rank, by_rank
from bough.trees.optimal_tree import best_chains, best_shape, expected_tokens
from bough.trees.tree_plan import Scheme, StaticShape


async def shape(arguments: argparse.Namespace) -> int:
    """Print the shape as one JSON line."""
    if arguments.by_depth and not arguments.from_live:
        raise ConfigError("--by-depth: must be given with --from-live only")
    if arguments.scheme and not arguments.from_live:
        raise ConfigError(f"--scheme: must be given with --from-live only, got {arguments.scheme}")
    acceptance = await live(arguments) if arguments.from_live else read_acceptance(arguments.vector)
    acceptance = acceptance[:, : arguments.max_children]
    levels = min(arguments.levels or arguments.nodes, arguments.nodes)
    began = time.perf_counter()
    best = best_shape(acceptance, arguments.nodes, levels)
    seconds = time.perf_counter() - began
    report = described(best, acceptance)
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
        report["chains"] = best_chains(acceptance, shape.budget, len(layer_sizes))._asdict()
    return report


def read_acceptance(file: str) -> Acceptance:
    """Read a JSON list by rank, or a list of lists by depth and rank.

    Raises:
        ConfigError: names the file, and the invalid entry.
    """
    return acceptance_from(f"--vector: {file}", read_json("--vector", "a JSON file", file))


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
