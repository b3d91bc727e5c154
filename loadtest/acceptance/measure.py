"""Measures contestants of `loadtest.acceptance` at one temperature, size by size."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping

import numpy as np

from bough.protocol.sampling_params import SamplingParams
from bough.trees.acceptance import Acceptance, by_rank
from bough.trees.optimal_tree import expected_tokens
from bough.trees.tree_plan import Growth, Scheme, StaticShape, TreePlan
from loadtest.acceptance.bench import Bench
from loadtest.acceptance.contestants import contestants_at
from loadtest.acceptance.report import Row, interval


def measure(
    benches: Mapping[tuple[bool, bool], Bench], temperature: float, arguments: argparse.Namespace, rows: list[Row]
) -> None:
    """Measure the contestants at one temperature and add their rows, except for rows that exist already.

    `benches` are keyed by whether verification is multi-round and whether the draft is calibrated.
    """
    params, other_seed = (SamplingParams(temperature=temperature, seed=arguments.seed + i) for i in range(2))
    for name, contestant in contestants_at(temperature, arguments).items():
        done = {row["nodes"] for row in rows if (row["temperature"], row["contestant"]) == (temperature, name)}
        if done.issuperset(arguments.nodes):
            continue
        bench = benches[contestant.is_multi_round, contestant.is_calibrated]
        # As in service, shapes are chosen by measurements with other random numbers.
        before = by_rank(bench.acceptance(contestant.scheme, contestant.guess, other_seed))
        last_plan: TreePlan | None = None
        same_texts: Acceptance | None = None
        for nodes in sorted(set(arguments.nodes) - done):
            plan = contestant.plan(before, nodes) if nodes > 1 else TreePlan(StaticShape(()), contestant.scheme)
            if plan != last_plan:  # chains have at most LEVELS nodes whatever the budget
                # With scheme TARGET, a seed's text does not depend on the tree, nor do predictions from it.
                of_one_text = contestant.scheme is Scheme.TARGET
                outcome = bench.run(plan, params, 1 if of_one_text else arguments.repeats)
                if same_texts is None or not of_one_text:
                    same_texts = by_rank(bench.acceptance(contestant.scheme, contestant.guess, params, outcome))
                last_plan = plan
            assert same_texts is not None, "the first plan is like none before"
            row: Row = {
                "temperature": temperature,
                "contestant": name,
                "nodes": nodes,
                "tokens_per_round": round(float(np.mean(outcome.per_prompt)), 3),
                "interval": round(interval(outcome.per_prompt, arguments.seed), 3),
                "of_all_rounds": round(outcome.mean_of_rounds, 3),
                "predicted": _predicted(plan.growth, same_texts),
                "predicted_before": _predicted(plan.growth, before),
                "settings": settings_of(arguments),
            }
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            if arguments.rows:
                with arguments.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def _predicted(growth: Growth, vector: Acceptance) -> float | None:
    """Predicted mean tokens per round with equal weights; None if the tree depends on the draft's probabilities."""
    match growth:
        case StaticShape() if growth.parents:
            return round(expected_tokens(growth, vector), 3)
        case _:
            return None


def settings_of(arguments: argparse.Namespace) -> dict[str, object]:
    """The settings that rows depend on but do not contain."""
    names = ("num", "max_tokens", "repeats", "seed", "drop_layers", "bits")
    prompts = arguments.prompts.name if arguments.prompts else "bough's own"
    return {name: getattr(arguments, name) for name in names} | {"prompts": prompts}


def rows_before(arguments: argparse.Namespace) -> list[Row]:
    """Return the rows of an earlier run; end the process if its settings were others."""
    if arguments.rows is None or not arguments.rows.exists():
        return []
    rows: list[Row] = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    settings = settings_of(arguments)
    for row in rows:
        if row.get("settings") != settings:
            sys.exit(f"--rows: {arguments.rows} must have rows of {settings}, got rows of {row.get('settings')}")
    return rows
