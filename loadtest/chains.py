"""Why Sequoia's trees beat SpecInfer's chains by as much as they do, taken apart, without any timing.

    python -m loadtest.chains

Rounds are simulated over the distributions at every place of the demonstration pair's texts; shapes and chains are the
best ones for the mean acceptance by rank. By the formula, a round that has chosen one chain's first token goes on with
that chain alone: "apart". But chains are drawn independently, so some begin alike, and where a token is accepted
all chains that have it go on: "together", as bough (and SpecInfer, which merges them into a tree) verifies them.
"even" takes each place for the average one, as Sequoia's positional assumption does. "own" chains are SpecInfer's
settings, 5 of 8 and 16 of 48, whatever the pair. Ends with one JSON line: tokens per round, for the demonstration pair
by temperature, and by the formula for the published acceptance of Llama-3 8B and 70B.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bough.cli.up import ensure_demonstration
from bough.config.cache_paths import demonstration_folder
from bough.config.parsers import parse_layers
from bough.protocol.sampling_params import SamplingParams
from bough.trees.acceptance import FloatArray
from bough.trees.optimal_tree import best_chains, best_shape, expected_tokens, expected_tokens_of_chains
from bough.trees.tree_plan import Chains, StaticShape
from loadtest.scheme_pairs import Models, from_models, pair_of
from loadtest.scheme_rates import Pair, in_rounds, one_after_another

RANKS = list(range(1, 17))
LEVELS = 18
PASSES = 20  # over all places
OWN = (Chains(5, 8), Chains(16, 48))  # SpecInfer's settings on one GPU and with offloading, as Sequoia compares with
PUBLISHED = Path(__file__).parent / "data" / "acceptance-published.json"


def shape_of(chains: Chains) -> StaticShape:
    """The same as a shape, level by level."""
    first = [0] * chains.num
    return StaticShape(tuple(first + [1 + node for node in range(chains.num * (chains.length - 1))]))


def simulated(shape: StaticShape, gains: FloatArray, num_passes: int, rng: np.random.Generator) -> float:
    """Tokens per round along places whose children are accepted with `gains` (places, ranks), over and over."""
    children: list[list[int]] = [[] for _ in range(shape.budget)]
    for index, parent in enumerate(shape.parents):
        children[parent].append(index + 1)
    place, num_rounds, end = 0, 0, num_passes * len(gains)
    reached = np.cumsum(gains, 1)
    while place < end:
        node = 0
        while children[node]:
            rank = int(np.searchsorted(reached[place % len(gains)], rng.random(), side="right"))
            place += 1
            if rank >= len(children[node]):
                break
            node = children[node][rank]
        else:
            place += 1  # the bonus token below a leaf
        num_rounds += 1
    return place / num_rounds


def simulated_together(chains: Chains, pairs: Sequence[Pair], num_passes: int, rng: np.random.Generator) -> float:
    """The same of chains whose tokens are drawn independently, and which stay together for as long as they agree."""
    place, num_rounds, end = 0, 0, num_passes * len(pairs)
    while place < end:
        num, depth = chains.num, 0
        while num and depth < chains.length:
            num = _that_agree(pairs[place % len(pairs)], num, rng)
            place, depth = place + 1, depth + 1
        place += num > 0  # the bonus token below a leaf
        num_rounds += 1
    return place / num_rounds


def _that_agree(pair: Pair, num: int, rng: np.random.Generator) -> int:
    """How many of so many draws are the token that multi-round verification accepts; 0 where it accepts none."""
    left, draft = pair.target_probs[:-1], pair.draft_probs
    beyond = pair.target_probs[-1]  # tokens that the draft never draws
    drawn = rng.choice(len(draft), num, p=draft)
    for token in drawn:
        if rng.random() * draft[token] < left[token]:
            return int((drawn == token).sum())
        left = np.maximum(left - draft, 0.0)
        total = left.sum() + beyond
        if total == 0.0:
            return 0
        left, beyond = left / total, beyond / total
    return 0


def gains_of(reached: Sequence[Sequence[float]]) -> FloatArray:
    """(places, ranks) what each rank adds to the chance that one of the first so many is accepted."""
    return np.diff(np.array(reached), axis=1, prepend=0.0).clip(0)


def compared(pairs: Sequence[Pair], nodes: Sequence[int], seed: int) -> list[dict[str, float]]:
    """Both kinds at each size."""
    rng, rows = np.random.default_rng(seed), []
    trees = gains_of([one_after_another(pair, RANKS, rng, num=20) for pair in pairs])
    gains = gains_of([[in_rounds(pair, k) for k in RANKS] for pair in pairs])
    tree_mean, mean = trees.mean(0, keepdims=True), gains.mean(0, keepdims=True)
    own = {settings.budget: settings for settings in OWN}
    for size in sorted({*nodes, *own}):
        shape, best = best_shape(tree_mean, size, LEVELS), best_chains(mean, size, LEVELS)
        row = {
            "nodes": size,
            "trees": simulated(shape, trees, PASSES, rng),
            "trees, even": expected_tokens(shape, tree_mean),
            "chains apart": simulated(shape_of(best), gains, PASSES, rng),
            "chains apart, even": expected_tokens_of_chains(best, mean),
            "chains together": simulated_together(best, pairs, PASSES, rng),
        }
        if size in own:
            row["own chains apart"] = simulated(shape_of(own[size]), gains, PASSES, rng)
            row["own chains together"] = simulated_together(own[size], pairs, PASSES, rng)
        rows.append({name: round(value, 2) for name, value in row.items()})
        print(rows[-1], flush=True)
    return rows


def published(nodes: int) -> dict[str, float]:
    """By the formula, which is all that the vector allows; its chains are taken to accept as its trees do."""
    acceptance = np.array([json.loads(PUBLISHED.read_text())])
    tokens = {
        "trees, even": expected_tokens(best_shape(acceptance, nodes, LEVELS), acceptance),
        "chains apart, even": expected_tokens_of_chains(best_chains(acceptance, nodes, LEVELS), acceptance),
        "own chains apart, even": expected_tokens_of_chains(OWN[1], acceptance),
    }
    return {name: round(value, 2) for name, value in tokens.items()}


def main() -> None:
    """Prints a line for each size, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.6, 1.0])
    parser.add_argument("--nodes", nargs="+", type=int, default=[32, 128, 512])
    parser.add_argument("--drop-layers", default="3,14", help="of the substitute")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--length", type=int, default=64, help="positions of a prompt's answer")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    ensure_demonstration(0)
    drops = parse_layers(arguments.drop_layers)
    models = Models.load(demonstration_folder(0), drops, arguments.prompts)
    results: dict[str, object] = {"published": published(OWN[1].budget)}
    print(results)
    for temperature in arguments.temperatures:
        params = SamplingParams(temperature=temperature, seed=arguments.seed)
        pairs = [pair_of(both, params) for both in from_models(models, models.texts(arguments.length, params))]
        print(f"temperature {temperature}, {len(pairs)} places")
        results[str(temperature)] = compared(pairs, arguments.nodes, arguments.seed)
    print(json.dumps(results | {"seed": arguments.seed, "places": arguments.prompts * arguments.length}))


if __name__ == "__main__":
    main()
