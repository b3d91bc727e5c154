"""JSON about rounds, for the page at /ui and other observers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from bough.protocol.decision import Decision
from bough.protocol.generation import Tokens
from orchestrator.http_api.fields.errors import Json

NANO = 1e-9


def round_of(event: Tokens) -> Json:
    """One round: its tree, its accepted nodes, and its times.

    `parents` are those of the verified nodes, -1 for the root; `accepted` are node numbers from the root down.
    """
    timings, verified = event.timings, event.verified
    compute_ns = max(0, timings.target_ns - timings.queue_ns - timings.wait_ns)
    parts = ("total", "draft", "network", "queue", "wait", "other")
    return {
        "nodes": event.num_nodes,
        "depth": event.tree_depth,
        "parents": verified.tree.parents.tolist() if verified else [],
        "accepted": list(verified.accepted_nodes) if verified else [],
        "texts": list(event.texts),
        "drafted": list(event.drafted),
        "seconds": {name: getattr(timings, f"{name}_ns") * NANO for name in parts} | {"compute": compute_ns * NANO},
    }


def decisions_told(decisions: Sequence[Decision]) -> list[Json]:
    """Reasons for the sizes of trees, oldest round first, as `bough explain` prints them."""
    return [asdict(decision) | {"mode": decision.mode.value} for decision in decisions]
