"""What it costs to grow the trees of several sessions together: time for 1, 2, 4, 8 sessions, against one's.

    python -m loadtest.draft_batch --sessions 1 2 4 8 --width 16

The demonstration draft in this process, no target. Every growth stands one token earlier in prompts whose keys and
values are held, so that trees are grown cold and nothing else is run. Numbers of sessions take turns, and so do the
prompts that fewer than the most sessions have, as trees differ in steps; medians. A step is a growth's time over
its draft steps: beside the model's, which `loadtest.draft_step` measures, all that is done to choose nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import NamedTuple

from bough.cli.up import ensure_demonstration
from bough.config.cache_paths import SUBSTITUTE_DROPS, demonstration_folder
from bough.config.processes import DraftConfig, parse
from bough.protocol.messages import Context, GrowCall
from bough.protocol.sampling_params import SamplingParams
from bough.tokenization.tokenizer import Tokenizer
from bough.trees.tree_plan import BestFirst, TreePlan
from draft_worker.worker import DraftWorker
from loadtest.prompts import load_prompts

PROMPT = 200  # tokens of every session's context


class Growth(NamedTuple):
    """Of some trees together."""

    seconds: float
    num_steps: int


def grow_together(
    draft: DraftWorker, prompts: dict[int, list[int]], held: int, params: SamplingParams, plan: TreePlan
) -> Growth:
    """Until all have a tree: sessions by number."""
    calls = [
        GrowCall(Context.of(str(number), tokens, held, len(tokens)), tokens[-1], params, 0, plan)
        for number, tokens in prompts.items()
    ]
    began = time.perf_counter()
    results = [future.result() for future in [draft.grow(call) for call in calls]]
    seconds = time.perf_counter() - began
    num_warm = sum(result.num_warm_nodes for result in results)
    if num_warm:
        raise RuntimeError(f"{num_warm} nodes were known beforehand: what was timed is no cold growth")
    return Growth(seconds, max(result.timings.num_passes for result in results))


def main() -> None:
    """Prints a table and one JSON line."""
    arguments = _arguments()
    ensure_demonstration(0)
    flags = ["--model", str(demonstration_folder(0)), "--drop-layers", arguments.drop_layers]
    config = parse(DraftConfig, "bench", [*flags, "--sharpness", str(arguments.sharpness)], {})
    draft = DraftWorker(config, "bench")
    tokenizer = Tokenizer(draft.tokenizer)
    texts = load_prompts() * (1 + max(arguments.sessions) // 16)
    prompts = [tokenizer.encode("\n".join(texts[i:] + texts[:i]))[:PROMPT] for i in range(max(arguments.sessions))]
    params = SamplingParams(temperature=arguments.temperature, seed=1)
    plan = TreePlan(BestFirst(arguments.budget, arguments.width, arguments.depth))
    growths: dict[int, list[Growth]] = {count: [] for count in arguments.sessions}
    grow_together(draft, dict(enumerate(prompts)), 0, params, plan)  # runs the prompts
    for turn in range(arguments.rounds * len(growths)):
        length, count = PROMPT - 1 - turn, arguments.sessions[turn % len(growths)]
        whose = [(turn // len(growths) * count + number) % len(prompts) for number in range(count)]
        begun = {number: prompts[number][:length] for number in whose}
        growths[count].append(grow_together(draft, begun, length, params, plan))
    draft.close()
    medians = {count: statistics.median(growth.seconds for growth in some) for count, some in growths.items()}
    steps = {count: statistics.median(one.seconds / one.num_steps for one in some) for count, some in growths.items()}
    fewest = min(medians)
    for count, median in medians.items():
        told = f"{median * 1e3:7.1f} ms, {median / medians[fewest]:.2f} times {fewest}"
        print(f"{count:3} sessions: {told}; a step {steps[count] * 1e3:.1f} ms")
    result = {
        "growth_ms": {count: round(median * 1e3, 1) for count, median in medians.items()},
        "step_ms": {count: round(median * 1e3, 2) for count, median in steps.items()},
        "batch_ratio": round(medians[max(medians)] / medians[fewest], 2),
        "cpus": os.cpu_count(),
    }
    print(json.dumps(vars(arguments) | result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", nargs="+", type=int, default=[1, 2, 4, 8], help="growing at the same time")
    parser.add_argument("--budget", type=int, default=64, help="nodes of a tree")
    parser.add_argument("--width", type=int, default=16, help="nodes that a draft step expands")
    parser.add_argument("--depth", type=int, default=7, help="levels of a tree")
    parser.add_argument("--drop-layers", default=SUBSTITUTE_DROPS, help="substitute: layers left out")
    parser.add_argument(
        "--sharpness",
        type=float,
        default=1.0,
        help="of guesses: there is no target to learn it from. 1.5 is what it comes to greedily (docs/measurements.md)",
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--temperature", type=float, default=0.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
