"""Measures tokens per round and draft time of substitute drafts, by left-out layers and tree size.

    python -m loadtest.draft --drops 12-15 3,14,25 --budgets 16 32 64

Draft and target run in this process; the target is the unexpanded demonstration model, whose text is the expanded
one's. Tokens per round do not depend on the machine; the times do. Greedy unless --temperature says otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import NamedTuple

from bough.config.cache_paths import demonstration_folder
from bough.config.flag_parser import FlagParser
from bough.config.processes import DraftConfig, TargetConfig, parse
from bough.processes.demonstration import ensure_demonstration
from bough.protocol.messages import Context, GrowCall, VerifyCall
from bough.protocol.sampling_params import SamplingParams
from bough.tokenization.tokenizer import Tokenizer
from bough.trees.tree_plan import BestFirst, TreePlan
from draft_worker.worker import DraftWorker
from loadtest.common.prompts import load_prompts
from target_worker.worker import TargetWorker


class Tally(NamedTuple):
    """Sums of a run's rounds."""

    tokens: int = 0
    rounds: int = 0
    steps: int = 0
    draft_ns: int = 0
    nodes: int = 0
    top1: int = 0  # rounds whose first bonus or accepted token was the draft's first guess

    def add(self, other: Tally) -> Tally:
        """The sums of both runs."""
        return Tally(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def run_prompt(
    target: TargetWorker, draft: DraftWorker, prompt: list[int], size: BestFirst, params: SamplingParams, length: int
) -> Tally:
    """Generate `length` tokens with trees of one size."""
    tokens, tally, draft_held, target_held = list(prompt), Tally(), 0, 0
    while len(tokens) - len(prompt) < length:
        grown = draft.grow(
            GrowCall(
                Context.of("bench", tokens, draft_held, len(prompt)), tokens[-1], params, tally.rounds, TreePlan(size)
            )
        ).result()
        call = VerifyCall(Context.of("bench", tokens, target_held, len(prompt)), 1, tally.rounds, grown.tree, params)
        result = target.verify(call).result()
        new = [int(grown.tree.tokens[node]) for node in result.verdict.accepted_nodes] + [result.verdict.bonus_token]
        first = grown.tree.tokens[1] if len(grown.tree) > 1 else -1
        tally = tally.add(
            Tally(
                len(new),
                1,
                grown.timings.num_passes,
                grown.timings.total_ns,
                len(grown.tree),
                int(new[0] == first),
            )
        )
        tokens += new
        draft_held, target_held = grown.held_length, result.held_length
    target.release("bench").result()
    draft.release("bench").result()
    return tally


def main() -> None:
    """Print a table and one JSON line."""
    arguments = _arguments()
    ensure_demonstration(0)
    folder = str(demonstration_folder(0))
    target = TargetWorker(parse(TargetConfig, "bench", ["--model", folder, "--max-context", "1024"], {}), "bench")
    tokenizer = Tokenizer(target.tokenizer)
    prompts = [tokenizer.encode_chat([("user", text)]) for text in load_prompts(arguments.prompts)[: arguments.num]]
    params = SamplingParams(temperature=arguments.temperature, seed=arguments.seed)
    rows = []
    print(
        f"{'drops':>12} {'budget':>6} {'width':>5} {'depth':>5} "
        f"{'tokens/round':>12} {'first guess':>11} {'steps':>6} ms/step"
    )
    for drops in arguments.drops:
        flags = ["--model", folder, "--drop-layers", "" if drops == "none" else drops]
        draft = DraftWorker(parse(DraftConfig, "bench", flags, {}), "bench")
        for sizes in itertools.product(arguments.budgets, arguments.widths, arguments.depths):
            size = BestFirst(*sizes)
            tally = Tally()
            for prompt in prompts:
                tally = tally.add(run_prompt(target, draft, prompt, size, params, arguments.max_tokens))
            row = {
                "drops": drops,
                "budget": size.budget,
                "width": size.width,
                "depth": size.depth,
                "tokens_per_round": round(tally.tokens / tally.rounds, 3),
                "first_guess_rate": round(tally.top1 / tally.rounds, 3),
                "steps_per_round": round(tally.steps / tally.rounds, 2),
                "step_ms": round(tally.draft_ns / tally.steps / 1e6, 1),
            }
            rows.append(row)
            print(
                f"{drops:>12} {size.budget:6} {size.width:5} {size.depth:5} {row['tokens_per_round']:12} "
                f"{row['first_guess_rate']:11} {row['steps_per_round']:6} {row['step_ms']}",
                flush=True,
            )
        draft.close()
    target.close()
    settings = {"prompts": len(prompts), "max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    print(json.dumps({**settings, "seed": arguments.seed, "rows": rows}))


def _arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__)
    parser.add_argument("--drops", nargs="+", default=["3,14,25", "12-15"], help="substitutes: layers left out")
    parser.add_argument("--budgets", nargs="+", type=int, default=[16, 32, 64], help="nodes of a tree")
    parser.add_argument("--widths", nargs="+", type=int, default=[8], help="nodes that a draft step expands")
    parser.add_argument("--depths", nargs="+", type=int, default=[12], help="levels of a tree")
    parser.add_argument("--num", type=int, default=8, help="prompts")
    parser.add_argument("--prompts", type=Path, help="JSONL file with `text` or `turns`; bough's own by default")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
