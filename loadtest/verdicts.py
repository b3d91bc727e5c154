"""What the target's verdict on a tree costs by scheme: the part of a round that is neither sweep nor draft.

    python -m loadtest.verdicts --vocab-sizes 49152 151936

Trees in the best shape for Sequoia's published acceptance by rank (arXiv 2402.12374, appendix E), filled as each scheme
has them filled, over random logits from which the draft's differ by noise. A verdict asks for the target's
probabilities along the path that it accepts, by Scheme.TRAVERSAL wherever a node has children. Ends with one JSON line:
milliseconds of a verdict, medians, by vocabulary, scheme and nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from bough.protocol.messages import Context, GrowCall, VerifyCall
from bough.protocol.sampling_params import SamplingParams
from bough.trees.acceptance import acceptance_from
from bough.trees.optimal_tree import best_shape
from bough.trees.tree import Tree
from bough.trees.tree_plan import Scheme, StaticShape, TreePlan
from draft_worker.growth.grower import Candidates
from draft_worker.growth.static_shape import grower_for, weights_of
from target_worker.verification.verdict import judge

PUBLISHED = Path(__file__).parent / "data" / "acceptance-published.json"
TEXT = [1, 2, 3]
SPREAD, NOISE = 5.0, 0.7  # of logits, and of the draft's from the target's: as sure and as near as language models are
NUM_CANDIDATES = 64

Logits = NDArray[np.float32]  # (num_nodes, vocab_size)


def grown(call: GrowCall, draft_logits: Logits) -> Tree:
    """The tree of a draft that says this after its nodes."""
    grower = grower_for(call, NUM_CANDIDATES, draft_logits.shape[1])
    while len(frontier := grower.frontier()):
        rows = draft_logits[frontier] / np.float32(call.sampling.temperature)
        best = np.argsort(-rows, axis=1)[:, :NUM_CANDIDATES].astype(np.int32)
        scores = np.take_along_axis(rows, best, 1)
        candidates = Candidates(best, scores - scores[:, :1])
        if call.plan.scheme is Scheme.TARGET:
            total = np.log(weights_of(candidates).sum(1, keepdims=True))
            candidates = Candidates(best, candidates.log_probs - total)
        grower.take(frontier, candidates)
    return grower.finished()


def time_verdicts(scheme: Scheme, shape: StaticShape, vocab_size: int, arguments: argparse.Namespace) -> list[float]:
    """Milliseconds of one verdict on each of several trees."""
    times: list[float] = []
    for turn in range(arguments.turns):
        rng = np.random.default_rng([arguments.seed, turn])
        target_logits = SPREAD * rng.standard_normal((shape.budget, vocab_size), np.float32)
        draft_logits = target_logits + NOISE * rng.standard_normal(target_logits.shape, np.float32)
        params = SamplingParams(arguments.temperature, top_p=arguments.top_p, seed=turn)
        context = Context.of("bench", TEXT, 0, len(TEXT))
        tree = grown(GrowCall(context, TEXT[-1], params, 0, TreePlan(shape, scheme)), draft_logits)
        call = VerifyCall(context, 1, 0, tree, params, scheme)
        began_ns = time.perf_counter_ns()
        judge(call, TEXT, lambda path, logits=target_logits: logits[path[-1]].astype(np.float64))  # type: ignore[misc]
        times.append((time.perf_counter_ns() - began_ns) / 1e6)
    return times


def main() -> None:
    """Prints a line for each scheme and size and one JSON line."""
    arguments = _arguments()
    acceptance = acceptance_from(str(PUBLISHED), json.loads(PUBLISHED.read_text()))
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for vocab_size in arguments.vocab_sizes:
        for scheme in Scheme:
            of_scheme = figures.setdefault(str(vocab_size), {}).setdefault(scheme.value, {})
            for nodes in arguments.nodes:
                shape = best_shape(acceptance, nodes, arguments.levels)
                times = time_verdicts(scheme, shape, vocab_size, arguments)
                of_scheme[str(nodes)] = round(median(times), 2)
                print(f"{vocab_size:7} tokens {scheme.value:20} {nodes:4} nodes {median(times):8.2f} ms", flush=True)
    print(json.dumps(vars(arguments) | {"verdict_ms": figures, "cpus": os.cpu_count()}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 64, 512], help="of a tree")
    parser.add_argument("--levels", type=int, default=18, help="of a tree, the root's included")
    parser.add_argument("--vocab-sizes", nargs="+", type=int, default=[49152, 151936])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=9, help="trees of each kind")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
