"""Compares `bough simulate` with the papers' tables, and with sessions that were measured on this machine.

    python -m loadtest.capacity
    python -m loadtest.sessions --sessions 1 2 4 8 16 --rounds ROUNDS.json --orchestrator-flags "--planner fixed"
    python -m loadtest.capacity --sessions ROUNDS.json

Sessions that ran alone tell the machine's figures (link, computing by rows, draft steps, network) and how easy each
prompt is to guess; of several at once nothing is used but which prompts they asked, and how much of these was cached.
Ends with one JSON line: `papers` (errors of seconds a round, and of seconds a token by the published vector), and with
--sessions `sessions` by number of sessions, where `is_within` is 10 % for tokens per second and 20 % for the 95th
percentile of whole answers.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bough.config.flag_parser import FlagParser
from bough.errors import BoughError
from bough.simulation.profile import load_profile
from loadtest.capacity.papers import papers
from loadtest.capacity.sessions import compare, fit
from loadtest.sessions.rounds_file import read_runs


def _arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__)
    parser.add_argument("--sessions", default="", metavar="FILE", help="that loadtest.sessions --rounds has written")
    parser.add_argument("--prior", default="two-cores", help="profile of what sessions alone do not tell")
    parser.add_argument("--gather", type=float, default=1.0, help="the target's in that run")
    parser.add_argument("--sized", action="store_true", help="sizes were chosen in that run, and are chosen here")
    return parser.parse_args()


def _print_papers(found: dict[str, Any]) -> None:
    print(f"{'':52}{'seconds a round':>24}{'seconds a token':>30}", file=sys.stderr)
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
