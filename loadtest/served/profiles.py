"""Profiles of simulated workers with fixed times, so that measured differences are those of the APIs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ACCEPTANCE = {"kind": "by_rank", "vector": "llama-3-70b-8b-cnn-dailymail", "spread": 0.5}


def write_profile(
    folder: Path,
    sweep_seconds: float,
    knee_rows: int = 4096,
    kv_tokens: int = 2_000_000,
    max_context: int = 8192,
    max_nodes: int = 512,
) -> Path:
    """Write a profile: a sweep of up to `knee_rows` rows takes `sweep_seconds`, a draft step a hundredth of that."""
    profile: dict[str, Any] = {
        "source": f"Made up: sweeps of {sweep_seconds:g} s whatever they compute, to measure what stands before them.",
        "target": {
            "link_seconds": sweep_seconds,
            "compute_row_seconds": sweep_seconds / knee_rows,
            "max_sweep_rows": knee_rows,
            "kv_tokens": kv_tokens,
            "max_context": max_context,
            "max_nodes": max_nodes,
        },
        "draft": {"base_seconds": sweep_seconds / 100, "row_seconds": sweep_seconds / 100_000},
        "acceptance": ACCEPTANCE,
    }
    path = folder / f"sweep-{sweep_seconds:g}.json"
    path.write_text(json.dumps(profile))
    return path
