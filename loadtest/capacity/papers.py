"""Compares the simulator's predictions with Sequoia's and SpecExec's measurements on their hardware.

Two things are predicted apart. Seconds of a round follow from the link (bytes / bandwidth, as plain decoding in the
same table shows it), the draft's steps and the tree's size. Tokens of a round follow from Sequoia's published
acceptance vector. That is of other texts (CNN/DailyMail) than the tables (MT-Bench, OAsst), and of static trees:
SpecExec, which publishes none, grows its trees anew each time.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from bough.simulation.acceptance_law import LLAMA_3_CNN, AcceptanceLaw
from bough.simulation.profile import Profile, load_profile
from bough.trees.acceptance import smoothed
from bough.trees.optimal_tree import best_shape, expected_tokens
from bough.trees.tree_plan import BestFirst
from simulator.capacity import simulate
from simulator.scenario import RequestKind, Scenario, of_size

VECTOR = AcceptanceLaw("by_rank", (LLAMA_3_CNN,))  # the same at all positions, for static trees
REQUEST = RequestKind(128, 512)


class Row(NamedTuple):
    """A line of a paper's table."""

    paper: str
    setting: str
    profile: str
    nodes: int
    depth: int | None  # levels below the root; None if the paper does not fix them
    tokens: float  # measured tokens of a round
    seconds_per_token: float  # measured
    is_fitted: bool = False  # whether the profile's draft was fitted to this line


ROWS = (
    Row("Sequoia", "Llama-3-70B / 8B, T 0", "l40-70b-16bit", 768, 17, 11.68, 0.60),
    Row("Sequoia", "Llama-3-70B / 8B, T 0.6", "l40-70b-16bit", 768, 17, 11.37, 0.61),
    Row("Sequoia", "Llama-2-70B / 7B, T 0", "l40-70b-16bit", 768, 17, 10.30, 0.66),
    Row("Sequoia", "Llama-2-70B / 7B, T 0.6", "l40-70b-16bit", 768, 17, 9.91, 0.68),
    Row("SpecExec", "Llama-3-70B / 8B, 16 bit, A100, T 0", "a100-70b-16bit", 2048, None, 21.58, 1 / 2.94),
    Row("SpecExec", "Llama-2-70B / 7B, 16 bit, A100, T 0.6", "a100-70b-16bit", 2048, None, 20.60, 1 / 3.12),
    Row("SpecExec", "Llama-2-70B / 7B, 16 bit, A100, T 0", "a100-70b-16bit", 1024, None, 18.8, 1 / 2.74),
    Row(
        "SpecExec", "Llama-2-70B / 7B, 4 bit, A100, T 0.6", "a100-70b-4bit", 128, None, 12.10, 1 / 6.02, is_fitted=True
    ),
    Row("SpecExec", "Llama-2-70B / 7B, 4 bit, A100, T 0", "a100-70b-4bit", 256, None, 13.43, 1 / 6.17),
)


@cache
def depth_of(nodes: int) -> int:
    """Levels below the root of the best tree of `nodes` nodes."""
    return best_shape(smoothed(VECTOR.acceptance()), nodes, nodes).depth


def tokens_of(law: AcceptanceLaw, nodes: int, depth: int) -> float:
    """Expected tokens of a round by the best tree of this size where all positions are alike."""
    acceptance = smoothed(law.acceptance())
    return expected_tokens(best_shape(acceptance, nodes, depth + 1), acceptance)


def round_seconds(profile: Profile, size: BestFirst) -> float:
    """Predicted seconds of one user's rounds: drafting, calls, and the sweep."""
    steps = size.depth * profile.draft.step_seconds(size.width)
    return steps + profile.target.sweep_seconds(size.budget) + 2 * profile.network.call_seconds()


def line(row: Row) -> dict[str, Any]:
    """Predictions and measurements of a row; errors are relative to the measurement."""
    profile = load_profile(row.profile)
    size = of_size(row.nodes, row.depth or depth_of(row.nodes))
    seconds, tokens = round_seconds(profile, size), tokens_of(VECTOR, size.budget, size.depth)
    measured_round = row.tokens * row.seconds_per_token
    return {
        "paper": row.paper,
        "setting": row.setting,
        "nodes": row.nodes,
        "depth": size.depth,
        "is_fitted": row.is_fitted,
        "round_seconds": round(measured_round, 3),
        "predicted_round_seconds": round(seconds, 3),
        "round_error": round(seconds / measured_round - 1, 4),
        "seconds_per_token": round(row.seconds_per_token, 4),
        "with_their_tokens": round(seconds / row.tokens, 4),
        "tokens": row.tokens,
        "tokens_by_vector": round(tokens, 2),
        "with_vector": round(seconds / tokens, 4),
        "vector_error": round(seconds / tokens / row.seconds_per_token - 1, 4),
    }


def simulated_seconds_per_token(row: Row, seed: int = 1) -> float:
    """The simulator's seconds per token of one user with acceptance by the published vector."""
    size = of_size(row.nodes, row.depth or depth_of(row.nodes))
    kind = REQUEST._replace(acceptance=VECTOR)
    profile = load_profile(row.profile)
    return simulate(Scenario(profile, kinds=(kind,), fixed=size, seed=seed)).tpot.p50


def papers() -> dict[str, Any]:
    """All rows, and the largest errors: of rounds not used in fitting, and of the paper that published the vector."""
    lines = [line(row) for row in ROWS]
    others = [each for each in lines if not each["is_fitted"]]
    sequoia = [each for each in lines if each["paper"] == "Sequoia"]
    first = ROWS[0]
    return {
        "lines": lines,
        "worst_round_error": max(abs(each["round_error"]) for each in others),
        "worst_vector_error": max(abs(each["vector_error"]) for each in sequoia),
        "simulated_seconds_per_token": round(simulated_seconds_per_token(first), 4),
        "reckoned_seconds_per_token": lines[0]["with_vector"],
    }
