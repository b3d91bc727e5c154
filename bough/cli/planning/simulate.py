"""`bough simulate`: predicts throughput and latency for many users and workers, and the best next purchase."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace

from bough.errors import ConfigError
from bough.simulation.profile import Profile, load_profile, shipped_profiles
from bough.trees.tree_plan import BestFirst
from simulator.scenario import CapacityReport, Purchase, RequestKind, Scenario, of_size, rounded

LIST = "list"
_KIND = re.compile(r"([0-9]{1,7}):([0-9]{1,7})(?::([0-9]{1,6}(?:\.[0-9]{1,6})?))?")


async def simulate(arguments: argparse.Namespace) -> int:
    """Print a table with a column for each number of users, or one JSON line for all."""
    if arguments.profile == LIST:
        for name in shipped_profiles():
            print(f"{name}: {load_profile(name).source}")
        return 0
    scenarios = scenarios_from(arguments)
    for scenario in scenarios:
        scenario.check()
    found = [_run(scenario, with_purchases=not arguments.no_purchases) for scenario in scenarios]
    if arguments.json:
        runs = [report.as_json() | {"purchases": [rounded(each) for each in bought]} for report, bought in found]
        print(json.dumps({"profile": arguments.profile, "runs": runs}))
        return 0
    print(f"{arguments.profile}: {scenarios[0].profile.source}\n")
    print("\n".join(_table([report for report, _ in found])))
    for report, bought in found:
        print(f"\n{_workers(report)}: the first bottleneck is {report.bottleneck}.")
        for each in bought:
            print(
                f"  {each.name:44} {each.user_gain:+7.1%} tokens per second per user, "
                f"{each.throughput_gain:+7.1%} of all; p95 of answers {-each.p95_latency_gain:+7.1%}"
            )
        if not report.is_complete:
            print("  stopped at the limit of simulated rounds: percentiles cover fewer requests than intended")
    return 0


def scenarios_from(arguments: argparse.Namespace) -> list[Scenario]:
    """A scenario for each number of users.

    Raises:
        ConfigError: names the invalid flag.
    """
    profile, fixed = _profile(arguments), _fixed(arguments)
    return [
        Scenario(
            profile,
            num_users=users,
            num_targets=arguments.targets,
            num_drafts=arguments.drafts,
            kinds=parse_mix(arguments.mix),
            think_seconds=arguments.think,
            gather=arguments.gather,
            fixed=fixed,
            seed=arguments.seed,
        )
        for users in arguments.users
    ]


def parse_mix(text: str) -> tuple[RequestKind, ...]:
    """Kinds of requests from "200:200" or "200:200:4,2000:100:1".

    Raises:
        ConfigError: the text is invalid.
    """
    kinds = []
    for part in text.split(","):
        match = _KIND.fullmatch(part.strip())
        kind = RequestKind(int(match[1]), int(match[2]), float(match[3] or 1)) if match else None
        if kind is None or not (kind.prompt_tokens and kind.output_tokens and kind.weight):
            raise ConfigError(f"--mix: must be PROMPT:OUTPUT or PROMPT:OUTPUT:WEIGHT, all above 0, got {part!r}")
        kinds.append(kind)
    return tuple(kinds)


def _profile(arguments: argparse.Namespace) -> Profile:
    profile = load_profile(arguments.profile)
    if arguments.network is None:
        return profile
    return replace(profile, network=replace(profile.network, one_way_seconds=arguments.network))


def _fixed(arguments: argparse.Namespace) -> BestFirst | None:
    nodes, depth = arguments.nodes, arguments.depth
    if (nodes is None) != (depth is None):
        raise ConfigError("--nodes: must be given together with --depth, got one of them")
    if nodes is None:
        return None
    if depth >= nodes:
        raise ConfigError(f"--depth: must be below --nodes, {nodes}, got {depth}")
    return of_size(nodes, depth)


def _run(scenario: Scenario, *, with_purchases: bool) -> tuple[CapacityReport, list[Purchase]]:
    from simulator.capacity import purchases  # SimPy is an extra, which a list of profiles does not need
    from simulator.capacity import simulate as run

    report = run(scenario)
    return report, purchases(scenario, report) if with_purchases else []


def _workers(report: CapacityReport) -> str:
    def some(count: int, name: str) -> str:
        return f"{count} {name}{'' if count == 1 else 's'}"

    parts = (some(report.num_users, "user"), some(report.num_targets, "target"), some(report.num_drafts, "draft"))
    return ", ".join(parts)


def _table(reports: list[CapacityReport]) -> list[str]:
    """A table with a line for each figure and a column for each report."""
    rows: list[tuple[str, list[str]]] = [
        ("users", [str(each.num_users) for each in reports]),
        ("tokens per second, all users", [f"{each.tokens_per_second:.4g}" for each in reports]),
        ("tokens per second per user", [f"{each.user_tokens_per_second:.3g}" for each in reports]),
    ]
    for title, name in (("first token", "ttft"), ("seconds per token", "tpot"), ("whole answer", "latency")):
        values = [getattr(each, name) for each in reports]
        rows.append((f"{title}: p50 / p95 / p99, s", [" / ".join(f"{v:.3g}" for v in value) for value in values]))
    rows += [
        ("nodes, depth of a tree", [f"{each.nodes:.3g}, {each.depth:.2g}" for each in reports]),
        ("tokens, seconds of a round", [f"{each.tokens_per_round:.3g}, {each.round_seconds:.3g}" for each in reports]),
        ("rows, sessions of a sweep", [f"{each.rows_per_sweep:.4g}, {each.riders_per_sweep:.3g}" for each in reports]),
        (
            "busy: link, target, draft",
            [f"{each.link_busy:.0%}, {each.target_busy:.0%}, {each.draft_busy:.0%}" for each in reports],
        ),
        ("users waiting for a place", [f"{each.waiting_users:.4g}" for each in reports]),
    ]
    width = max(len(cell) for _, cells in rows for cell in cells)
    return [f"{title:36}" + "".join(f"{cell:>{width + 2}}" for cell in cells) for title, cells in rows]
