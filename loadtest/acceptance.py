"""Tokens per round by verification scheme, growth, tree size and temperature, and how well they are predicted.

    python -m loadtest.acceptance

Draft and target run in this process; the target is the unexpanded demonstration model, whose text is the expanded
one's. Trees are grown by the draft worker as it is, all prompts in step, and judged by the target worker's own code;
only, the target computes logits where the walk through a tree asks for them, not at every node. So tokens per round are
what the pipeline gives, and the sweeps that they would have cost are not paid for. With --crossed the same of ways that
the papers do not compare; with --contestants of those alone whose names hold what it says. Drafts learn how sure they
may be as in service, but SpecExec's takes its probabilities as they are, as the paper does. Ends with one JSON line:

tokens_per_round   by temperature, contestant and nodes: [mean over prompts, half the width of its 95 % confidence
                   interval (bootstrap over prompts)]
prediction_error   mean of |predicted / measured - 1| by contestant, of tokens per round where every round weighs the
                   same. Shapes are predicted from the acceptance by rank along the same texts, best-first trees by a
                   calibration learnt on other prompts. prediction_error_before has the vectors of another seed's
                   texts, by which the shapes were chosen: what chance does to a text is in it too. prediction_errors
                   and _before have the worst sizes as well
draft_step_ratio   by frontier: a draft step over reading the draft's weights from memory once (`loadtest.draft_step`)
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bough.cli.up import ensure_demonstration
from bough.config.cache_paths import SUBSTITUTE_DROPS, demonstration_folder
from bough.config.processes import DraftConfig, parse
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.cpu.threads import compute_with
from bough.protocol.sampling_params import SamplingParams
from bough.tokenization.tokenizer import Tokenizer
from bough.trees.acceptance import Acceptance, by_rank
from bough.trees.optimal_tree import best_chains, best_shape, expected_tokens, expected_tokens_of_chains
from bough.trees.tree_plan import BestFirst, Chains, Growth, Guess, Scheme, StaticShape, TreePlan
from draft_worker.model.sources import load_draft
from draft_worker.worker import DraftWorker
from loadtest import draft_step
from loadtest.acceptance_bench import RANKS, Bench, Outcome
from loadtest.acceptance_report import Row, interval, plot, prediction_errors, table, tokens_per_round
from loadtest.acceptance_target import LazyTarget
from loadtest.calibration import Calibration
from loadtest.draft_step import CPU
from loadtest.drafts import draft_flags
from loadtest.prompts import load_prompts

LEVELS = 18  # of shapes and chains, at most
STEP_TURNS = 21  # in which draft steps are timed
EVERYONE = ""  # is part of every name


class Contestant(NamedTuple):
    """A way of growing and verifying; its growth depends on the acceptance measured beforehand and the nodes."""

    scheme: Scheme
    guess: Guess
    growth: Callable[[Acceptance, int], Growth]
    is_calibrated: bool = True  # the draft learns how sure it may be; otherwise its probabilities are taken as they are

    def plan(self, acceptance: Acceptance, nodes: int) -> TreePlan:
        """For trees of so many nodes."""
        return TreePlan(self.growth(acceptance, nodes), self.scheme, self.guess)


def grown_best_first(_: Acceptance, nodes: int) -> Growth:
    """As wide as is worth it."""
    width = max(2, min(32, nodes // 8))
    return BestFirst(nodes, width, min(LEVELS - 1, nodes - 1))


def _shape(acceptance: Acceptance, nodes: int) -> Growth:
    return best_shape(acceptance, nodes, LEVELS)


def _chains(acceptance: Acceptance, nodes: int) -> Growth:
    return best_chains(acceptance, nodes, LEVELS)


def _chain(_: Acceptance, nodes: int) -> Growth:
    return Chains(1, min(LEVELS, nodes) - 1)


DRAWN = {  # above temperature 0
    "bough: target, best-first, shared noise": Contestant(Scheme.TARGET, Guess.SAMPLE, grown_best_first),
    "target, optimal shape, shared noise": Contestant(Scheme.TARGET, Guess.SAMPLE, _shape),
    "SpecExec: target, best-first": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, grown_best_first, False),
    "target, optimal top-k shape": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, _shape),
    "Sequoia: without replacement, optimal shape": Contestant(Scheme.WITHOUT_REPLACEMENT, Guess.SAMPLE, _shape),
    "SpecInfer: multi-round, k chains": Contestant(Scheme.MULTI_ROUND, Guess.SAMPLE, _chains),
}
DRAWN_CROSSED = {  # the other growths of each scheme
    "target, best-first, shared noise, as sure as the draft": Contestant(
        Scheme.TARGET, Guess.SAMPLE, grown_best_first, False
    ),
    "target, best-first": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, grown_best_first),
    "target, k chains, shared noise": Contestant(Scheme.TARGET, Guess.SAMPLE, _chains),
    "target, one chain, shared noise": Contestant(Scheme.TARGET, Guess.SAMPLE, _chain),
    "traversal, optimal shape": Contestant(Scheme.TRAVERSAL, Guess.SAMPLE, _shape),
    "without replacement, k chains": Contestant(Scheme.WITHOUT_REPLACEMENT, Guess.SAMPLE, _chains),
    "multi-round, optimal shape": Contestant(Scheme.MULTI_ROUND, Guess.SAMPLE, _shape),
    "multi-round, one chain": Contestant(Scheme.MULTI_ROUND, Guess.SAMPLE, _chain),
}
GREEDY = {  # at temperature 0, where all schemes agree
    "bough: target, best-first": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, grown_best_first),
    "SpecExec: target, best-first": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, grown_best_first, False),
    "target, optimal top-k shape": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, _shape),
    "greedy k chains": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, _chains),
}
GREEDY_CROSSED = {"greedy, one chain": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, _chain)}


def contestants_at(temperature: float, arguments: argparse.Namespace) -> dict[str, Contestant]:
    """Those of the tables; of them what `--contestants` asks for."""
    usual, others = (GREEDY, GREEDY_CROSSED) if temperature == 0 else (DRAWN, DRAWN_CROSSED)
    of_table = (others if arguments.crossed else usual).items()
    return {name: one for name, one in of_table if any(wanted in name for wanted in arguments.contestants)}


def measure(benches: Mapping[bool, Bench], temperature: float, arguments: argparse.Namespace, rows: list[Row]) -> None:
    """The contestants at one temperature, but for what is among the rows already; adds to these.

    The benches are one with a calibrated draft, and one whose draft takes its probabilities as they are.
    """
    params, other_seed = (SamplingParams(temperature=temperature, seed=arguments.seed + i) for i in range(2))
    for name, contestant in contestants_at(temperature, arguments).items():
        done = {row["nodes"] for row in rows if (row["temperature"], row["contestant"]) == (temperature, name)}
        if done.issuperset(arguments.nodes):
            continue
        bench = benches[contestant.is_calibrated]
        # Shapes are chosen by what other random numbers came to, as they are in use.
        before = by_rank(bench.acceptance(contestant.scheme, contestant.guess, other_seed))
        last_plan: TreePlan | None = None
        same_texts: Acceptance | None = None
        for nodes in sorted(set(arguments.nodes) - done):
            plan = contestant.plan(before, nodes) if nodes > 1 else TreePlan(StaticShape(()), contestant.scheme)
            if plan != last_plan:  # a chain has as many nodes as there are levels, however many are allowed
                # Verified by TARGET, a seed's text is the same whatever the tree, and so is what is predicted from it.
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
                "predicted": _predicted(plan.growth, same_texts, outcome),
                "predicted_before": _predicted(plan.growth, before, outcome),
                "settings": _settings(arguments),
            }
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            if arguments.rows:
                with arguments.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def _predicted(growth: Growth, vector: Acceptance, outcome: Outcome) -> float | None:
    """Tokens per round, where every round weighs the same; None for a root alone."""
    match growth:
        case BestFirst():
            return round(_calibrated(outcome), 3)
        case StaticShape() if growth.parents:
            return round(expected_tokens(growth, vector), 3)
        case Chains():
            return round(expected_tokens_of_chains(growth, vector), 3)
        case _:
            return None


def _calibrated(outcome: Outcome) -> float:
    """What a calibration that is learnt on every other prompt expects of the rest's trees, and the other way round."""
    expected: list[float] = []
    for first in (0, 1):
        calibration = Calibration()
        for tree, accepted in itertools.chain(*outcome.rounds[first::2]):
            calibration.observe(tree, accepted)
        expected += [calibration.expected_tokens(tree) for tree, _ in itertools.chain(*outcome.rounds[1 - first :: 2])]
    return float(np.mean(expected))


def main() -> None:
    """Prints tables and one JSON line."""
    arguments = arguments_from()
    rows = rows_before(arguments)
    ensure_demonstration(0)
    folder = demonstration_folder(0)
    flags = ["--model", str(folder), *draft_flags(arguments.drop_layers), "--bits", arguments.bits]
    sizes = ["--max-nodes", "1024", "--branch", str(RANKS), "--max-context", "512", "--threads", str(arguments.threads)]
    config = parse(DraftConfig, "bench", [*flags, *sizes], {})
    drafts = {True: DraftWorker(config, "bench"), False: DraftWorker(replace(config, sharpness=1.0), "as it is")}
    tokenizer, target = Tokenizer(drafts[True].tokenizer), LazyTarget(folder, 1024)
    texts = load_prompts(arguments.prompts)[: arguments.num]
    prompts = [tokenizer.encode_chat([("user", text)]) for text in texts]
    benches = {which: Bench(draft, target, prompts, arguments.max_tokens) for which, draft in drafts.items()}
    for temperature in arguments.temperatures:
        measure(benches, temperature, arguments, rows)
    for note in drafts[True].info().notes:
        print(note, file=sys.stderr)
    for draft in drafts.values():
        draft.close()
    for temperature in arguments.temperatures:
        print(table(rows, temperature, arguments.nodes) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)
    compute_with(arguments.threads)
    model = load_draft(Checkpoint.open(folder), config.drop_layers, config.dtype, CPU, config.bits)
    timed = draft_step.measure({arguments.bits: model}, (1, 2, 4, 8, 16), STEP_TURNS)
    step_ratio = timed.ratios(arguments.bits)
    figures: dict[str, object] = {"tokens_per_round": tokens_per_round(rows), "draft_step_ratio": step_ratio}
    for which in ("", "_before"):
        errors = prediction_errors(rows, f"predicted{which}")
        figures[f"prediction_error{which}"] = {name: error["mean"] for name, error in errors.items()}
        figures[f"prediction_errors{which}"] = errors
    print(json.dumps({**_settings(arguments), **figures, "rows": rows}))


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    """All that rows depend on, beside what they tell."""
    names = ("num", "max_tokens", "repeats", "seed", "drop_layers", "bits")
    prompts = arguments.prompts.name if arguments.prompts else "bough's own"
    return {name: getattr(arguments, name) for name in names} | {"prompts": prompts}


def rows_before(arguments: argparse.Namespace) -> list[Row]:
    """What an earlier run has measured; ends the process where it was run with other settings."""
    if arguments.rows is None or not arguments.rows.exists():
        return []
    rows: list[Row] = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    settings = _settings(arguments)
    for row in rows:
        if row.get("settings") != settings:
            sys.exit(
                f"--rows: {arguments.rows} has rows of {row.get('settings')}, not of {settings}; another file would do"
            )
    return rows


def arguments_from(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Those of the command line by default; ends the process where a contestant is not known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.6, 1.0])
    parser.add_argument("--crossed", action="store_true", help="the other growths of each scheme instead")
    parser.add_argument(
        "--contestants", nargs="+", default=[EVERYONE], help="as the tables name them, or parts of their names"
    )
    parser.add_argument("--num", type=int, default=24, help="prompts")
    parser.add_argument("--prompts", type=Path, help="JSONL file with `text` or `turns`; bough's own by default")
    parser.add_argument("--max-tokens", type=int, default=32, help="of each prompt")
    parser.add_argument(
        "--repeats", type=int, default=2, help="of the schemes whose texts depend on the trees, with other seeds"
    )
    parser.add_argument("--drop-layers", default=SUBSTITUTE_DROPS, help="of the substitute draft (default %(default)s)")
    parser.add_argument("--bits", choices=["auto", "8", "16"], default="auto", help="of the draft's products")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="one is best where others compute too")
    parser.add_argument("--rows", type=Path, help="JSONL file: what is in it is not measured again, what is new added")
    parser.add_argument("--plot", type=Path, help="PNG file")
    arguments = parser.parse_args(argv)
    _require_known(arguments, parser)
    return arguments


def _require_known(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    everyone = argparse.Namespace(crossed=arguments.crossed, contestants=[EVERYONE])
    known = dict.fromkeys(name for t in arguments.temperatures for name in contestants_at(t, everyone))
    for wanted in arguments.contestants:
        if not any(wanted in name for name in known):
            parser.error(
                f"--contestants: {wanted!r} is part of no name at these temperatures; of one of these would do: "
                + "; ".join(known)
            )


if __name__ == "__main__":
    main()
