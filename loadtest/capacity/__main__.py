"""Compares `bough simulate` with the papers' tables, and with sessions that were measured on this machine.

    python -m loadtest.capacity
    python -m loadtest.sessions --sessions 1 2 4 8 16 --rounds ROUNDS.json --orchestrator-flags "--planner fixed"
    python -m loadtest.capacity --sessions ROUNDS.json

For papers, seconds per round follow from the link (bytes / bandwidth, from their plain decoding), the draft's steps and
the tree's size. Tokens per round follow from Sequoia's published acceptance vector, measured on other texts than the
tables (CNN/DailyMail, not MT-Bench or OAsst) and for static trees.

Sessions that ran alone give the machine's figures and how easy each prompt is to guess. Predictions for concurrent
sessions use only their prompts and how much of these was cached. Ends with one JSON line: `papers` (errors of seconds
per round, and of seconds per token by the vector), and with --sessions `sessions` by number of sessions, where
`is_within` means 10 % for tokens per second and 20 % for the 95th percentile of whole answers.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bough.config.flag_parser import FlagParser
from bough.errors import BoughError
from bough.simulation.acceptance_model import LLAMA_3_CNN, AcceptanceModel
from bough.simulation.profile import Profile, load_profile
from bough.trees.acceptance import smoothed
from bough.trees.optimal_tree import best_shape, expected_tokens
from bough.trees.tree_plan import BestFirst
from loadtest.capacity.sessions import compare, fit
from loadtest.sessions.rounds_file import read_runs
from simulator.capacity import simulate
from simulator.scenario import RequestKind, Scenario, of_size

VECTOR = AcceptanceModel("by_rank", (LLAMA_3_CNN,))  # the same at all positions, for static trees
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


def tokens_of(model: AcceptanceModel, nodes: int, depth: int) -> float:
    """Expected tokens of a round by the best tree of this size if all positions are equal."""
    acceptance = smoothed(model.acceptance())
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


def _arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__)
    parser.add_argument("--sessions", default="", metavar="FILE", help="file written by loadtest.sessions --rounds")
    parser.add_argument("--prior", default="two-cores", help="profile for what single sessions do not determine")
    parser.add_argument("--gather", type=float, default=1.0, help="the target's --gather in that run")
    parser.add_argument("--sized", action="store_true", help="trees sized themselves in that run, and do so here")
    return parser.parse_args()


def _print_papers(found: dict[str, Any]) -> None:
    print(f"{'':52}{'seconds per round':>24}{'seconds per token':>30}", file=sys.stderr)
    print(f"{'':52}{'paper':>8}{'here':>8}{'':8}{'paper':>8}{'here':>8}{'by vector':>14}", file=sys.stderr)
    for each in found["lines"]:
        name = f"{each['paper']}, {each['setting']}" + (" (fitted)" if each["is_fitted"] else "")
        print(
            f"{name:52}{each['round_seconds']:8.2f}{each['predicted_round_seconds']:8.2f}{each['round_error']:+8.1%}"
            f"{each['seconds_per_token']:8.3f}{each['with_their_tokens']:8.3f}{each['with_vector']:14.3f}",
            file=sys.stderr,
        )


def _sessions(arguments: argparse.Namespace) -> dict[str, Any]:
    runs = read_runs(Path(arguments.sessions))
    fitted = fit(runs, load_profile(arguments.prior))
    found = compare(runs, fitted, arguments.gather, is_sized=arguments.sized)
    for num, each in found.items():
        rate, p95 = each["predicted_tokens_per_second"], each["predicted_p95_seconds"]
        print(
            f"{num:>3} sessions: {each['tokens_per_second']:7.2f} tokens per second, predicted {rate:7.2f} "
            f"({each['throughput_error']:+.1%}); p95 {each['p95_seconds']:6.2f} s, predicted {p95:6.2f} "
            f"({each['p95_error']:+.1%})",
            file=sys.stderr,
        )
    profile = fitted.profile
    return {
        "by_number": found,
        "fitted": {
            "size": [fitted.size.budget, fitted.size.depth],
            "target": asdict(profile.target),
            "draft": asdict(profile.draft),
            "network": asdict(profile.network),
        },
    }


def main() -> None:
    """Print tables on standard error, and one JSON line."""
    arguments = _arguments()
    try:
        figures: dict[str, Any] = {"papers": papers()}
        _print_papers(figures["papers"])
        if arguments.sessions:
            figures["sessions"] = _sessions(arguments)
    except BoughError as exc:
        print(f"error: {exc}", file=sys.stderr)
        raise SystemExit(2) from exc
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
