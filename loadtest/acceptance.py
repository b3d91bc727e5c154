"""Tokens per round by verification scheme, growth, tree size and temperature, and how well they are predicted.

    python -m loadtest.acceptance

Draft and target run in this process; the target is the unexpanded demonstration model, whose text is the expanded
one's. Trees are grown by the draft worker as it is, all prompts in step, and judged by the target worker's own code;
only, the target computes logits where the walk through a tree asks for them, not at every node. So tokens per round are
what the pipeline gives, and the sweeps that they would have cost are not paid for. Ends with one JSON line:

tokens_per_round   by temperature, contestant and nodes: mean over prompts, with half the width of its 95 % confidence
                   interval (bootstrap over prompts)
prediction_error   mean of |predicted / measured - 1| by contestant. Shapes are predicted from the acceptance by rank of
                   texts of another seed, best-first trees by a calibration learnt on other prompts
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bough.acceptance import Acceptance, DepthCounts, SchemeAcceptance, by_rank
from bough.commands.up import ensure_demonstration
from bough.config import DraftConfig, parse
from bough.demonstration import demonstration_folder
from bough.growth import BestFirst, Chains, Growth, Guess, Scheme, StaticShape, TreePlan
from bough.messages import Context, GrowCall, VerifyCall
from bough.sampling import SamplingParams
from bough.shapes import best_chains, best_shape, expected_tokens, expected_tokens_of_chains
from bough.tokenizer import Tokenizer
from draft_worker.worker import DraftWorker
from loadtest.acceptance_report import interval, plot, prediction_error, table
from loadtest.acceptance_target import LazyTarget
from loadtest.calibration import Calibration
from loadtest.prompts import load_prompts

RANKS = 32  # children whose acceptance is measured
LEVELS = 18  # of shapes and chains, at most
SESSION = "acceptance-{}"


class Contestant(NamedTuple):
    """A way of growing and verifying; its growth depends on the acceptance measured beforehand and the nodes."""

    scheme: Scheme
    guess: Guess
    growth: Callable[[Acceptance, int], Growth]

    def plan(self, acceptance: Acceptance, nodes: int) -> TreePlan:
        """For trees of so many nodes."""
        return TreePlan(self.growth(acceptance, nodes), self.scheme, self.guess)


def _best_first(_: Acceptance, nodes: int) -> Growth:
    width = max(2, min(32, nodes // 8))
    return BestFirst(nodes, width, min(LEVELS - 1, nodes - 1))


def _shape(acceptance: Acceptance, nodes: int) -> Growth:
    return best_shape(acceptance, nodes, LEVELS)


def _chains(acceptance: Acceptance, nodes: int) -> Growth:
    return best_chains(acceptance, nodes, LEVELS)


CONTESTANTS = {
    "bough: target, best-first, shared noise": Contestant(Scheme.TARGET, Guess.SAMPLE, _best_first),
    "target, optimal shape, shared noise": Contestant(Scheme.TARGET, Guess.SAMPLE, _shape),
    "SpecExec: target, best-first": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, _best_first),
    "target, optimal top-k shape": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, _shape),
    "Sequoia: without replacement, optimal shape": Contestant(Scheme.WITHOUT_REPLACEMENT, Guess.SAMPLE, _shape),
    "SpecInfer: multi-round, k chains": Contestant(Scheme.MULTI_ROUND, Guess.SAMPLE, _chains),
}
GREEDY = ("SpecExec: target, best-first", "target, optimal top-k shape", "greedy k chains")  # without chance all agree
CONTESTANTS["greedy k chains"] = Contestant(Scheme.TARGET, Guess.DISTRIBUTION, _chains)


@dataclass(slots=True)
class Stream:
    """A prompt being continued."""

    name: str
    tokens: list[int]
    prompt_length: int
    draft_held: int = 0
    rounds: int = 0

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass(slots=True)
class Outcome:
    """Rounds of one contestant at one size and temperature."""

    per_prompt: list[float] = field(default_factory=list)  # tokens per round
    predicted: list[float] = field(default_factory=list)  # by the calibration, of each round of the second half
    realised: list[int] = field(default_factory=list)  # tokens of these rounds


class Bench:
    """A draft, a target, and prompts."""

    def __init__(self, draft: DraftWorker, target: LazyTarget, prompts: Sequence[list[int]], length: int) -> None:
        self._draft = draft
        self._target = target
        self._prompts = prompts
        self._length = length

    def run(self, plan: TreePlan, params: SamplingParams, calibration: Calibration | None = None) -> Outcome:
        """Continues all prompts in step. The calibration learns from the first half of them and predicts the second."""
        outcome = Outcome()
        streams = [Stream(SESSION.format(i), list(p), len(p)) for i, p in enumerate(self._prompts)]
        half = {stream.name for stream in streams[: len(streams) // 2]}
        for part in (streams[: len(streams) // 2], streams[len(streams) // 2 :]):
            while waiting := [stream for stream in part if stream.num_generated < self._length]:
                calls = [self._grow_call(stream, plan, params) for stream in waiting]
                for stream, grown in zip(waiting, [self._draft.grow(call) for call in calls], strict=True):
                    tree = grown.result().tree
                    stream.draft_held = grown.result().held_length
                    if calibration is not None and stream.name not in half:
                        outcome.predicted.append(calibration.expected_tokens(tree))
                    context = Context.of(stream.name, stream.tokens, 0, stream.prompt_length)
                    call = VerifyCall(context, 1, stream.rounds, tree, params, plan.scheme)
                    verdict = self._target.verify(call)
                    if calibration is not None and stream.name in half:
                        calibration.observe(tree, verdict.accepted_nodes)
                    elif calibration is not None:
                        outcome.realised.append(len(verdict.accepted_nodes) + 1)
                    stream.tokens += [int(tree.tokens[node]) for node in verdict.accepted_nodes]
                    stream.tokens.append(verdict.bonus_token)
                    stream.rounds += 1
        for stream in streams:
            self._draft.release(stream.name).result()
        outcome.per_prompt = [stream.num_generated / stream.rounds for stream in streams]
        return outcome

    def acceptance(self, scheme: Scheme, guess: Guess, params: SamplingParams) -> SchemeAcceptance:
        """By rank, from trees of a root and its children only, at every position of the texts."""
        accepted, rejected = np.zeros(RANKS), np.zeros(RANKS)
        growth = Chains(RANKS, 1) if scheme is Scheme.MULTI_ROUND else StaticShape((0,) * RANKS)
        plan = TreePlan(growth, scheme, guess)
        streams = [Stream(SESSION.format(i), list(p), len(p)) for i, p in enumerate(self._prompts)]
        for _ in range(self._length):
            calls = [self._grow_call(stream, plan, params) for stream in streams]
            for stream, grown in zip(streams, [self._draft.grow(call) for call in calls], strict=True):
                tree, stream.draft_held = grown.result().tree, grown.result().held_length
                context = Context.of(stream.name, stream.tokens, 0, stream.prompt_length)
                verdict = self._target.verify(VerifyCall(context, 1, stream.rounds, tree, params, scheme))
                if verdict.accepted_nodes:
                    accepted[verdict.accepted_nodes[0] - 1] += 1
                else:
                    rejected[len(tree) - 2] += 1
                # One token of a round is kept, so that every position is counted once.
                first = verdict.accepted_nodes[0] if verdict.accepted_nodes else None
                stream.tokens.append(verdict.bonus_token if first is None else int(tree.tokens[first]))
                stream.rounds += 1
        for stream in streams:
            self._draft.release(stream.name).result()
        counts = DepthCounts(tuple(accepted.tolist()), tuple(rejected.tolist()))
        return SchemeAcceptance(scheme, int(accepted.sum() + rejected.sum()), (counts,))

    def _grow_call(self, stream: Stream, plan: TreePlan, params: SamplingParams) -> GrowCall:
        context = Context.of(stream.name, stream.tokens, stream.draft_held, stream.prompt_length)
        return GrowCall(context, stream.tokens[-1], params, stream.rounds, plan)


def measure(bench: Bench, temperature: float, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """All contestants at one temperature."""
    rows: list[dict[str, object]] = []
    names = GREEDY if temperature == 0 else tuple(name for name in CONTESTANTS if name not in GREEDY[2:])
    for name in names:
        contestant = CONTESTANTS[name]
        # The acceptance is that of another seed, so that a prediction never sees what it is compared with.
        vector = by_rank(
            bench.acceptance(
                contestant.scheme, contestant.guess, SamplingParams(temperature=temperature, seed=arguments.seed + 1)
            )
        )
        for nodes in arguments.nodes:
            plan = contestant.plan(vector, nodes) if nodes > 1 else TreePlan(StaticShape(()), contestant.scheme)
            calibration = Calibration() if isinstance(plan.growth, BestFirst) and nodes > 1 else None
            outcome = bench.run(plan, SamplingParams(temperature=temperature, seed=arguments.seed), calibration)
            measured = float(np.mean(outcome.per_prompt))
            row = {
                "temperature": temperature,
                "contestant": name,
                "nodes": nodes,
                "tokens_per_round": round(measured, 3),
                "interval": round(interval(outcome.per_prompt, arguments.seed), 3),
                "predicted": _predicted(plan.growth, vector, outcome),
            }
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def _predicted(growth: Growth, vector: Acceptance, outcome: Outcome) -> list[float] | None:
    """Predicted and realised tokens per round."""
    realised = sum(1 / value for value in outcome.per_prompt)  # rounds weigh as they do when tokens are counted
    measured = len(outcome.per_prompt) / realised
    match growth:
        case BestFirst() if outcome.predicted:
            return [round(float(np.mean(outcome.predicted)), 3), round(float(np.mean(outcome.realised)), 3)]
        case StaticShape() if growth.parents:
            return [round(expected_tokens(growth, vector), 3), round(measured, 3)]
        case Chains():
            return [round(expected_tokens_of_chains(growth, vector), 3), round(measured, 3)]
        case _:
            return None


def main() -> None:
    """Prints tables and one JSON line."""
    arguments = _arguments()
    ensure_demonstration(0)
    folder = demonstration_folder(0)
    flags = ["--model", str(folder), "--drop-layers", arguments.drop_layers, "--max-nodes", "1024", "--branch", "32"]
    draft = DraftWorker(parse(DraftConfig, "bench", [*flags, "--max-context", "512"], {}), "bench")
    tokenizer = Tokenizer(draft.tokenizer)
    texts = load_prompts(arguments.prompts)[: arguments.num]
    prompts = [tokenizer.encode_chat([("user", text)]) for text in texts]
    bench = Bench(draft, LazyTarget(folder, 1024), prompts, arguments.max_tokens)
    rows = [row for temperature in arguments.temperatures for row in measure(bench, temperature, arguments)]
    draft.close()
    for temperature in arguments.temperatures:
        print(table(rows, temperature, arguments.nodes) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)
    settings = {name: getattr(arguments, name) for name in ("num", "max_tokens", "seed", "drop_layers")}
    figures = {
        f"{row['temperature']}": {
            str(name): {
                str(r["nodes"]): r["tokens_per_round"]
                for r in rows
                if r["contestant"] == name and r["temperature"] == row["temperature"]
            }
            for name in dict.fromkeys(r["contestant"] for r in rows if r["temperature"] == row["temperature"])
        }
        for row in rows
    }
    print(
        json.dumps({**settings, "tokens_per_round": figures, "prediction_error": prediction_error(rows), "rows": rows})
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.6, 1.0])
    parser.add_argument("--num", type=int, default=24, help="prompts")
    parser.add_argument("--prompts", type=Path, help="JSONL file with `text` or `turns`; bough's own by default")
    parser.add_argument("--max-tokens", type=int, default=32, help="of each prompt")
    parser.add_argument("--drop-layers", default="3,14", help="of the substitute draft")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="PNG file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
