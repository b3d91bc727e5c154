"""Measures tokens per round by verification scheme, growth, tree size and temperature.

    python -m loadtest.acceptance

Draft and target run in this process. The target is the unexpanded demonstration model, which has the expanded one's
text. The workers' own code grows and verifies trees for all prompts in step, but computes logits only for nodes on the
walk through a tree, so sweeps cost nothing. Drafts learn their calibration as in service; SpecExec's takes its
probabilities as they are, as in the paper. Ends with one JSON line:

tokens_per_round   by temperature, contestant and nodes: [mean over prompts, half the width of its 95 % confidence
                   interval (bootstrap over prompts)]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bough.config.cache_paths import SUBSTITUTE_DROPS, demonstration_folder
from bough.config.flag_parser import FlagParser
from bough.config.processes import DraftConfig, parse
from bough.processes.demonstration import ensure_demonstration
from bough.protocol.sampling_params import SamplingParams
from bough.tokenization.tokenizer import Tokenizer
from bough.trees.acceptance import Acceptance, by_rank
from bough.trees.optimal_tree import best_chains, best_shape
from bough.trees.tree_plan import BestFirst, Growth, Guess, Scheme, StaticShape, TreePlan
from draft_worker.worker import DraftWorker
from loadtest.acceptance.bench import RANKS, Bench, LazyTarget
from loadtest.common.prompts import load_prompts

LEVELS = 18  # most levels of shapes and chains
EVERYONE = ""  # a part of every name
Row = dict[str, Any]  # one contestant at one size


class Contestant(NamedTuple):
    """A way of growing and verifying trees; its growth depends on the budget and on acceptance measured before."""

    scheme: Scheme
    guess: Guess
    growth: Callable[[Acceptance, int], Growth]
    is_calibrated: bool = True  # whether the draft learns its temperature scaling

    def plan(self, acceptance: Acceptance, nodes: int) -> TreePlan:
        """The plan for trees of `num_nodes` nodes."""
        return TreePlan(self.growth(acceptance, nodes), self.scheme, self.guess)


def grown_best_first(_: Acceptance, nodes: int) -> Growth:
    """Best-first growth with a width suited to the budget."""
    width = max(2, min(32, nodes // 8))
    return BestFirst(nodes, width, min(LEVELS - 1, nodes - 1))


def _shape(acceptance: Acceptance, nodes: int) -> Growth:
    return best_shape(acceptance, nodes, LEVELS)


def _chains(acceptance: Acceptance, nodes: int) -> Growth:
    best = best_chains(acceptance, nodes, LEVELS)
    return StaticShape.chains(best.num, best.length)


DRAWN = {  # above temperature 0
    "bough: target, best-first, shared noise": Contestant(Scheme.TARGET, Guess.SAMPLE, grown_best_first),
    "target, optimal shape, shared noise": Contestant(Scheme.TARGET, Guess.SAMPLE, _shape),
    "SpecExec: target, best-first": Contestant(
        Scheme.TARGET, Guess.DISTRIBUTION, grown_best_first, is_calibrated=False
    ),
    "target, optimal top-k shape": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, _shape),
    "Sequoia: without replacement, optimal shape": Contestant(Scheme.WITHOUT_REPLACEMENT, Guess.SAMPLE, _shape),
}
GREEDY = {  # at temperature 0, where all schemes agree
    "bough: target, best-first": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, grown_best_first),
    "SpecExec: target, best-first": Contestant(
        Scheme.TARGET, Guess.DISTRIBUTION, grown_best_first, is_calibrated=False
    ),
    "target, optimal top-k shape": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, _shape),
    "greedy k chains": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, _chains),
}


def contestants_at(temperature: float, wanted: Sequence[str]) -> dict[str, Contestant]:
    """The contestants of a temperature whose names hold one of the given parts."""
    everyone = GREEDY if temperature == 0 else DRAWN
    return {name: one for name, one in everyone.items() if any(part in name for part in wanted)}


def measure(benches: Mapping[bool, Bench], temperature: float, arguments: argparse.Namespace) -> Iterator[Row]:
    """Measure the contestants at one temperature; yields a row for each size.

    `benches` are keyed by whether the draft is calibrated.
    """
    params, other_seed = (SamplingParams(temperature=temperature, seed=arguments.seed + i) for i in range(2))
    for name, contestant in contestants_at(temperature, arguments.contestants).items():
        bench = benches[contestant.is_calibrated]
        # As in service, shapes are chosen by measurements with other random numbers.
        before = by_rank(bench.acceptance(contestant.scheme, contestant.guess, other_seed))
        last_plan: TreePlan | None = None
        for nodes in sorted(arguments.nodes):
            plan = contestant.plan(before, nodes) if nodes > 1 else TreePlan(StaticShape(()), contestant.scheme)
            if plan != last_plan:  # chains have at most LEVELS nodes whatever the budget
                # With scheme TARGET, a seed's text does not depend on the tree.
                per_prompt = bench.run(plan, params, 1 if contestant.scheme is Scheme.TARGET else arguments.repeats)
                last_plan = plan
            row: Row = {
                "temperature": temperature,
                "contestant": name,
                "nodes": nodes,
                "tokens_per_round": round(float(np.mean(per_prompt)), 3),
                "interval": round(interval(per_prompt, arguments.seed), 3),
            }
            print(json.dumps(row), file=sys.stderr, flush=True)
            yield row


def interval(values: Sequence[float], seed: int) -> float:
    """Half the width of the mean's 95 % confidence interval."""
    rng = np.random.default_rng(seed)
    means = rng.choice(values, (2000, len(values))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(high - low) / 2


def table(rows: Sequence[Row], temperature: float, nodes: Sequence[int]) -> str:
    """The rows as a Markdown table."""
    lines = [
        f"| temperature {temperature:g}, nodes | " + " | ".join(map(str, nodes)) + " |",
        "|---" * (len(nodes) + 1) + "|",
    ]
    mine = [row for row in rows if row["temperature"] == temperature]
    for name in dict.fromkeys(row["contestant"] for row in mine):
        cells = [f"{row['tokens_per_round']:.2f} ±{row['interval']:.2f}" for row in mine if row["contestant"] == name]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tokens_per_round(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Mean tokens per round and half the width of its confidence interval, by temperature, contestant and nodes."""
    figures: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        contestants = figures.setdefault(str(row["temperature"]), {})
        figure = [row["tokens_per_round"], row["interval"]]
        contestants.setdefault(str(row["contestant"]), {})[str(row["nodes"])] = figure
    return figures


def main() -> None:
    """Print tables and one JSON line."""
    arguments = arguments_from()
    ensure_demonstration(0)
    folder = demonstration_folder(0)
    flags = ["--model", str(folder), "--drop-layers", arguments.drop_layers, "--bits", arguments.bits]
    sizes = ["--max-nodes", "1024", "--max-children", str(RANKS), "--max-context", "512"]
    config = parse(DraftConfig, "bench", [*flags, *sizes, "--threads", str(arguments.threads)], {})
    as_it_is = replace(config, inverse_temperature=1.0)
    drafts = {True: DraftWorker(config, "bench"), False: DraftWorker(as_it_is, "as it is")}
    tokenizer, target = Tokenizer(drafts[True].tokenizer), LazyTarget(folder, 1024)
    texts = load_prompts(arguments.prompts)[: arguments.num]
    prompts = [tokenizer.encode_chat([("user", text)]) for text in texts]
    benches = {
        is_calibrated: Bench(draft, target, prompts, arguments.max_tokens) for is_calibrated, draft in drafts.items()
    }
    rows = [row for temperature in arguments.temperatures for row in measure(benches, temperature, arguments)]
    for note in drafts[True].info().notes:
        print(note, file=sys.stderr)
    for draft in drafts.values():
        draft.close()
    for temperature in arguments.temperatures:
        print(table(rows, temperature, arguments.nodes) + "\n")
    names = ("num", "max_tokens", "repeats", "seed", "drop_layers", "bits")
    settings = {name: getattr(arguments, name) for name in names}
    settings["prompts"] = arguments.prompts.name if arguments.prompts else "bough's own"
    print(json.dumps({**settings, "tokens_per_round": tokens_per_round(rows)}))


def arguments_from(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse arguments, by default the command line's; exits with a message if a contestant is unknown."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.6, 1.0])
    parser.add_argument(
        "--contestants", nargs="+", default=[EVERYONE], help="names in the tables, or parts of them (default: all)"
    )
    parser.add_argument("--num", type=int, default=24, help="number of prompts")
    parser.add_argument("--prompts", type=Path, help="JSONL file with `text` or `turns` (default: bough's own)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of each prompt")
    parser.add_argument(
        "--repeats", type=int, default=2, help="runs with other seeds, of schemes whose texts depend on the trees"
    )
    parser.add_argument("--drop-layers", default=SUBSTITUTE_DROPS, help="layers that it lacks (default %(default)s)")
    parser.add_argument("--bits", choices=["auto", "8", "16"], default="auto", help="bits of the draft's products")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads; use one on a busy machine")
    arguments = parser.parse_args(argv)
    _require_known(arguments, parser)
    return arguments


def _require_known(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    known = dict.fromkeys(name for t in arguments.temperatures for name in contestants_at(t, [EVERYONE]))
    for wanted in arguments.contestants:
        if not any(wanted in name for name in known):
            parser.error(
                f"--contestants: must be part of a name at these temperatures ({'; '.join(known)}), got {wanted!r}"
            )


if __name__ == "__main__":
    main()
