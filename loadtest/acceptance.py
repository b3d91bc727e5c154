"""Tokens per round by verification scheme, growth, tree size and temperature, and how well they are predicted.

    python -m loadtest.acceptance

Draft and target run in this process; the target is the unexpanded demonstration model, whose text is the expanded
one's. Trees are grown by the draft worker as it is, all prompts in step, and judged by the target worker's own code;
only, the target computes logits where the walk through a tree asks for them, not at every node. So tokens per round are
what the pipeline gives, and the sweeps that they would have cost are not paid for. Ends with one JSON line:

tokens_per_round   by temperature, contestant and nodes: mean over prompts, with half the width of its 95 % confidence
                   interval (bootstrap over prompts)
prediction_error   mean of |predicted / measured - 1| by contestant, of tokens per round where every round weighs the
                   same. Shapes are predicted from the acceptance by rank along the same texts, best-first trees by a
                   calibration learnt on other prompts. prediction_error_before has the vectors of another seed's
                   texts, by which the shapes were chosen: what chance does to a text is in it too
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bough.acceptance import Acceptance, DepthCounts, SchemeAcceptance, by_rank
from bough.calibration import Calibration
from bough.commands.up import ensure_demonstration
from bough.config import DraftConfig, parse
from bough.demonstration import demonstration_folder
from bough.growth import BestFirst, Chains, Growth, Guess, Scheme, StaticShape, TreePlan
from bough.messages import Context, GrowCall, Verdict, VerifyCall
from bough.model.checkpoint import Checkpoint
from bough.model.threads import compute_with
from bough.sampling import SamplingParams
from bough.shapes import best_chains, best_shape, expected_tokens, expected_tokens_of_chains
from bough.tokenizer import Tokenizer
from bough.tree import Tree
from bough.values import parse_layers
from draft_worker.sources import load_draft
from draft_worker.worker import DraftWorker
from loadtest import draft_step
from loadtest.acceptance_report import Row, interval, plot, prediction_error, table, tokens_per_round
from loadtest.acceptance_target import LazyTarget
from loadtest.draft_step import CPU
from loadtest.prompts import load_prompts

RANKS = 32  # children whose acceptance is measured
LEVELS = 18  # of shapes and chains, at most
STEP_TURNS = 21  # in which draft steps are timed


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
    rounds: list[list[tuple[Tree, tuple[int, ...]]]] = field(default_factory=list)  # of each prompt: tree, accepted

    @property
    def mean_of_rounds(self) -> float:
        """Tokens per round where every round weighs the same."""
        num_tokens = [len(accepted) + 1 for rounds in self.rounds for _, accepted in rounds]
        return float(np.mean(num_tokens))


class Bench:
    """A draft, a target, and prompts that are continued in step."""

    def __init__(self, draft: DraftWorker, target: LazyTarget, prompts: Sequence[list[int]], length: int) -> None:
        self._draft = draft
        self._target = target
        self._prompts = prompts
        self._length = length

    def run(self, plan: TreePlan, params: SamplingParams) -> Outcome:
        """Rounds until every prompt has its tokens."""
        outcome = Outcome(rounds=[[] for _ in self._prompts])
        with self._streams() as streams:
            while waiting := [index for index, stream in enumerate(streams) if stream.num_generated < self._length]:
                for index, (tree, verdict) in zip(
                    waiting, self._round([streams[i] for i in waiting], plan, params), strict=True
                ):
                    streams[index].tokens += verdict.tokens_of(tree)
                    outcome.rounds[index].append((tree, verdict.accepted_nodes))
            outcome.per_prompt = [stream.num_generated / stream.rounds for stream in streams]
        return outcome

    def acceptance(self, scheme: Scheme, guess: Guess, params: SamplingParams) -> SchemeAcceptance:
        """By rank, from trees of a root and its children only, at every position of the texts."""
        accepted, rejected = np.zeros(RANKS), np.zeros(RANKS)
        growth = Chains(RANKS, 1) if scheme is Scheme.MULTI_ROUND else StaticShape((0,) * RANKS)
        plan = TreePlan(growth, scheme, guess)
        with self._streams() as streams:
            for _ in range(self._length):
                for stream, (tree, verdict) in zip(streams, self._round(streams, plan, params), strict=True):
                    if verdict.accepted_nodes:
                        accepted[verdict.accepted_nodes[0] - 1] += 1
                    else:
                        rejected[len(tree) - 2] += 1
                    stream.tokens.append(verdict.tokens_of(tree)[0])  # one, so that every position is counted once
        counts = DepthCounts(tuple(accepted.tolist()), tuple(rejected.tolist()))
        return SchemeAcceptance(scheme, int(accepted.sum() + rejected.sum()), (counts,))

    def _round(self, streams: Sequence[Stream], plan: TreePlan, params: SamplingParams) -> list[tuple[Tree, Verdict]]:
        """A tree for each stream, and the verdict on it."""
        growing = [self._draft.grow(_grow_call(stream, plan, params)) for stream in streams]
        trees = [grown.result().tree for grown in growing]
        calls = [
            VerifyCall(_context(stream, 0), 1, stream.rounds, tree, params, plan.scheme)
            for stream, tree in zip(streams, trees, strict=True)
        ]
        for stream, grown in zip(streams, growing, strict=True):
            stream.draft_held = grown.result().held_length
            stream.rounds += 1
        return [*zip(trees, self._target.verify(calls), strict=True)]

    @contextmanager
    def _streams(self) -> Iterator[list[Stream]]:
        streams = [Stream(f"prompt-{index}", [*prompt], len(prompt)) for index, prompt in enumerate(self._prompts)]
        yield streams
        for stream in streams:
            self._draft.release(stream.name).result()


def _context(stream: Stream, held: int) -> Context:
    return Context.of(stream.name, stream.tokens, held, stream.prompt_length)


def _grow_call(stream: Stream, plan: TreePlan, params: SamplingParams) -> GrowCall:
    return GrowCall(_context(stream, stream.draft_held), stream.tokens[-1], params, stream.rounds, plan)


def measure(bench: Bench, temperature: float, arguments: argparse.Namespace, rows: list[Row]) -> None:
    """All contestants at one temperature, but for what is among the rows already; adds to these."""
    names = GREEDY if temperature == 0 else tuple(name for name in CONTESTANTS if name not in GREEDY[2:])
    params, others = (SamplingParams(temperature=temperature, seed=arguments.seed + i) for i in range(2))
    for name in names:
        contestant = CONTESTANTS[name]
        done = {row["nodes"] for row in rows if (row["temperature"], row["contestant"]) == (temperature, name)}
        if done.issuperset(arguments.nodes):
            continue
        # Shapes are chosen by what other random numbers came to, as they are in use.
        before = by_rank(bench.acceptance(contestant.scheme, contestant.guess, others))
        same_texts = by_rank(bench.acceptance(contestant.scheme, contestant.guess, params))
        for nodes in sorted(set(arguments.nodes) - done):
            plan = contestant.plan(before, nodes) if nodes > 1 else TreePlan(StaticShape(()), contestant.scheme)
            outcome = bench.run(plan, params)
            row: Row = {
                "temperature": temperature,
                "contestant": name,
                "nodes": nodes,
                "tokens_per_round": round(float(np.mean(outcome.per_prompt)), 3),
                "interval": round(interval(outcome.per_prompt, arguments.seed), 3),
                "of_all_rounds": round(outcome.mean_of_rounds, 3),
                "predicted": _predicted(plan.growth, same_texts, outcome),
                "predicted_before": _predicted(plan.growth, before, outcome),
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
    arguments = _arguments()
    ensure_demonstration(0)
    folder = demonstration_folder(0)
    flags = ["--model", str(folder), "--drop-layers", arguments.drop_layers, "--bits", arguments.bits]
    sizes = ["--max-nodes", "1024", "--branch", str(RANKS), "--max-context", "512", "--threads", str(arguments.threads)]
    draft = DraftWorker(parse(DraftConfig, "bench", [*flags, *sizes], {}), "bench")
    tokenizer = Tokenizer(draft.tokenizer)
    texts = load_prompts(arguments.prompts)[: arguments.num]
    prompts = [tokenizer.encode_chat([("user", text)]) for text in texts]
    bench = Bench(draft, LazyTarget(folder, 1024), prompts, arguments.max_tokens)
    rows: list[Row] = []
    if arguments.rows and arguments.rows.exists():
        rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    for temperature in arguments.temperatures:
        measure(bench, temperature, arguments, rows)
    draft.close()
    for temperature in arguments.temperatures:
        print(table(rows, temperature, arguments.nodes) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)
    settings = {name: getattr(arguments, name) for name in ("num", "max_tokens", "seed", "drop_layers", "bits")}
    compute_with(arguments.threads)
    model = load_draft(
        Checkpoint.open(folder), parse_layers(arguments.drop_layers), "bfloat16", CPU, bits=arguments.bits
    )
    timed = draft_step.measure({arguments.bits: model}, (1, 2, 4, 8, 16), STEP_TURNS)
    step_ratio = timed.ratios(arguments.bits)
    figures = {"tokens_per_round": tokens_per_round(rows), "draft_step_ratio": step_ratio}
    errors = {f"prediction_error{which}": prediction_error(rows, f"predicted{which}") for which in ("", "_before")}
    print(json.dumps({**settings, **figures, **errors, "rows": rows}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.6, 1.0])
    parser.add_argument("--num", type=int, default=24, help="prompts")
    parser.add_argument("--prompts", type=Path, help="JSONL file with `text` or `turns`; bough's own by default")
    parser.add_argument("--max-tokens", type=int, default=32, help="of each prompt")
    parser.add_argument("--drop-layers", default="3,14", help="of the substitute draft")
    parser.add_argument("--bits", choices=["auto", "8", "16"], default="auto", help="of the draft's products")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="one is best where others compute too")
    parser.add_argument("--rows", type=Path, help="JSONL file: what is in it is not measured again, what is new added")
    parser.add_argument("--plot", type=Path, help="PNG file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
