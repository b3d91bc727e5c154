"""Measures draft-ahead: how often the outcome was already grown, and the remaining time of growth.

    python -m loadtest.draft.ahead --ahead-steps 0 16 64 --sweep-seconds 1
    python -m loadtest.draft.ahead --growth SHAPE.json --scheme without-replacement --temperature 0.6

The demonstration model as the target and its substitute as the draft, both in this process. The target's sweep is
simulated: the verdict is the real one, and then the target's thread sleeps, as if weights crossed a link of another
machine. So the draft has the processors to itself, which on a target's own CPU it would not.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from bough.cli.flags.speculation import add_speculation, speculation_from
from bough.cli.machine.up import ensure_demonstration
from bough.config.cache_paths import SUBSTITUTE_DROPS, demonstration_folder
from bough.config.flag_parser import FlagParser
from bough.config.processes import DraftConfig, TargetConfig, parse
from bough.protocol.messages import Context, GrowCall, VerifyCall, VerifyResult
from bough.protocol.sampling_params import SamplingParams
from bough.tokenization.tokenizer import Tokenizer
from bough.trees.tree_plan import BestFirst, TreePlan
from draft_worker.worker import DraftWorker
from loadtest.common.prompts import load_prompts
from target_worker.worker import TargetWorker


class Tally(NamedTuple):
    """Sums over rounds, without each prompt's first, for which nothing can be grown ahead."""

    rounds: int = 0
    tokens: int = 0
    warm: int = 0  # rounds whose tree was grown ahead at least in part
    whole: int = 0  # rounds that needed no further draft step
    steps: int = 0
    draft_ns: int = 0

    def add(self, other: Tally) -> Tally:
        """The sums of both."""
        return Tally(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class SlowTarget:
    """A target whose sweeps take a given time, in a separate thread."""

    def __init__(self, target: TargetWorker, sweep_seconds: float) -> None:
        self._target, self._sweep_seconds = target, sweep_seconds
        self._thread = ThreadPoolExecutor(1, "sweep")

    def verify(self, call: VerifyCall) -> VerifyResult:
        """Return the verdict after a sweep's time."""
        return self._thread.submit(self._verify, call).result()

    def _verify(self, call: VerifyCall) -> VerifyResult:
        result = self._target.verify(call).result()
        time.sleep(self._sweep_seconds)
        return result


def run_prompt(
    target: SlowTarget, draft: DraftWorker, prompt: list[int], plan: TreePlan, params: SamplingParams, length: int
) -> Tally:
    """Generate `length` tokens."""
    session_id = f"bench {time.monotonic_ns()}"  # unique, as the target still holds sessions of earlier settings
    tokens, tally, draft_held, target_held, round_ = list(prompt), Tally(), 0, 0, 0
    while len(tokens) - len(prompt) < length:
        context = Context.of(session_id, tokens, draft_held, len(prompt))
        grown = draft.grow(GrowCall(context, tokens[-1], params, context.base_length, plan)).result()
        context = Context.of(session_id, tokens, target_held, len(prompt))
        verdict = target.verify(VerifyCall(context, 1, round_, grown.tree, params, scheme=plan.scheme))
        accepted = verdict.verdict.accepted_nodes
        tokens += [*(int(grown.tree.tokens[node]) for node in accepted), verdict.verdict.bonus_token]
        draft_held, target_held = grown.held_length, verdict.held_length
        if round_ > 0:
            steps, is_warm = grown.timings.num_passes, grown.num_warm_nodes > 0
            tally = tally.add(Tally(1, len(accepted) + 1, int(is_warm), int(steps == 0), steps, grown.timings.total_ns))
        round_ += 1
    draft.release(session_id).result()
    return tally


def main() -> None:
    """Print a line for each setting and one JSON line."""
    arguments = _arguments()
    ensure_demonstration(0)
    folder = str(demonstration_folder(0))
    worker = TargetWorker(parse(TargetConfig, "bench", ["--model", folder, "--max-context", "1024"], {}), "bench")
    target = SlowTarget(worker, arguments.sweep_seconds)
    tokenizer = Tokenizer(worker.tokenizer)
    prompts = [tokenizer.encode_chat([("user", text)]) for text in load_prompts()[: arguments.num]]
    params = SamplingParams(temperature=arguments.temperature, seed=1)
    asked = speculation_from(arguments)
    best_first = BestFirst(asked.budget or 64, asked.width or 16, asked.depth or 7)
    plan = TreePlan(asked.growth or best_first, asked.scheme)
    rows = []
    for ahead_steps in arguments.ahead_steps:
        flags = ["--model", folder, "--drop-layers", arguments.drop_layers, "--ahead-steps", str(ahead_steps)]
        draft = DraftWorker(parse(DraftConfig, "bench", flags, {}), "bench")
        tally = Tally()
        for prompt in prompts:
            tally = tally.add(run_prompt(target, draft, prompt, plan, params, arguments.max_tokens))
        draft.close()
        rows.append(
            {
                "ahead_steps": ahead_steps,
                "rounds": tally.rounds,
                "tokens_per_round": round(tally.tokens / tally.rounds, 2),
                "hit_rate": round(tally.warm / tally.rounds, 3),
                "whole_tree_rate": round(tally.whole / tally.rounds, 3),
                "steps_per_round": round(tally.steps / tally.rounds, 2),
                "draft_ms_per_round": round(tally.draft_ns / tally.rounds / 1e6, 1),
            }
        )
        print(rows[-1], flush=True)
    worker.close()
    setting = {"nodes": plan.growth.budget, "growth": repr(plan.growth), "scheme": plan.scheme.value}
    print(json.dumps(vars(arguments) | setting | {"cpus": os.cpu_count(), "rows": rows}))


def _arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__)
    parser.add_argument("--ahead-steps", nargs="+", type=int, default=[0, 16, 64], help="settings to compare")
    parser.add_argument("--sweep-seconds", type=float, default=1.0, help="of the simulated sweep")
    add_speculation(parser)
    parser.add_argument("--drop-layers", default=SUBSTITUTE_DROPS, help="substitute: layers left out")
    parser.add_argument("--num", type=int, default=6, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
