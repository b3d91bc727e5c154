"""What verification that looks at whole paths accepts beyond verification token by token, without any timing.

    python -m loadtest.traversal

Trees of Sequoia's kind are drawn by the demonstration pair's draft below places of texts that the target sampled, each
in the best shape for the pair's acceptance by rank. What Sequoia's rule and traversal verification (Scheme.TRAVERSAL)
accept of each is worked out from their laws. Below the same places stand bough's own trees: best-first, of as many
nodes, of what is likely under the noise that the target draws with, for several seeds. Ends with one JSON line: tokens
per round by temperature and nodes, and traversal's and shared noise's over Sequoia's with their 95 % half-widths
(bootstrap over prompts).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.cli.up import ensure_demonstration
from bough.config.cache_paths import demonstration_folder
from bough.config.parsers import parse_layers
from bough.config.processes import DraftConfig, parse
from bough.model.batch.batch import Batch, Segment
from bough.model.batch.gpu_paths import IntArray
from bough.model.kv.session_kv import KVSlot
from bough.model.running.runner import ResidentModel
from bough.model.sampling.draft_sampler import draft_weights, without_replacement
from bough.model.sampling.sampler import probabilities
from bough.protocol.sampling_params import SamplingParams
from bough.trees.draft_probs import DraftProbs, normalised
from bough.trees.optimal_tree import best_shape
from bough.trees.tree import Tree
from bough.trees.tree_plan import Guess, Scheme, StaticShape, TreePlan
from draft_worker.worker import DraftWorker
from loadtest.acceptance import grown_best_first
from loadtest.acceptance_bench import Bench, Stream
from loadtest.acceptance_report import interval
from loadtest.acceptance_target import LazyTarget
from loadtest.chains import LEVELS, RANKS, gains_of
from loadtest.scheme_pairs import CPU, MAX_TOKENS, Models, from_models, pair_of, read_on
from loadtest.scheme_rates import one_after_another
from target_worker.verification.verdict import laws_of

SCHEMES = (Scheme.WITHOUT_REPLACEMENT, Scheme.TRAVERSAL)
RULES = ("token by token", "traversal", "shared noise")
SEEDS = 4  # of shared noise, at each place


class Drafted(NamedTuple):
    """A tree, and what the target says after each of its nodes."""

    tree: Tree
    target_logits: NDArray[np.float64]  # (num_nodes, vocab_size)


class Place(NamedTuple):
    """Where a tree is drawn: a slot of each model holds the text before `text[length]`, which is the root."""

    text: Sequence[int]
    length: int
    target_slot: KVSlot
    draft_slot: KVSlot


def drafted(models: Models, place: Place, shape: StaticShape, params: SamplingParams, seed: int) -> Drafted:
    """A tree, its children drawn without replacement."""
    parents, depths = np.array([-1, *shape.parents]), np.array(shape.depths())
    vocab_size = models.target.skeleton.vocab_size
    tokens, rng = np.full(len(parents), place.text[place.length]), np.random.default_rng(seed)
    supports: dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}
    for depth in range(depths.max()):
        begin, end = np.searchsorted(depths, (depth, depth + 1))
        level = _tree(tokens, parents)
        rows = _logits(models.draft, Segment.tree(place.draft_slot, place.length, level).part(begin, end))
        for node in np.unique(parents[depths == depth + 1]).tolist():
            candidates, weights = supports[node] = draft_weights(rows[node - begin], params, MAX_TOKENS)
            below = np.flatnonzero(parents == node)
            tokens[below] = without_replacement(candidates, normalised(weights), len(below), vocab_size, rng)
    tree = _tree(tokens, parents, DraftProbs.joined(supports))
    return Drafted(tree, _logits(models.target, Segment.tree(place.target_slot, place.length, tree)))


def mean_tokens(drafted: Drafted, scheme: Scheme, params: SamplingParams) -> float:
    """Of a round with this tree."""
    tree, probs = drafted.tree, [probabilities(row, params) for row in drafted.target_logits]
    law, means = laws_of(tree, scheme, probs.__getitem__), np.ones(len(tree))
    for node, children in reversed(list(enumerate(tree.children()))):
        if children:
            means[node] += law(node, probs[node])[[*children]] @ means[[*children.values()]]
    return float(means[0])


def _tree(tokens: IntArray, parents: IntArray, draft_probs: DraftProbs | None = None) -> Tree:
    return Tree(tokens.astype(np.int32), parents.astype(np.int32), np.zeros(len(parents), np.float32), draft_probs)


def _logits(model: ResidentModel, segment: Segment) -> NDArray[np.float64]:
    return model.logits(Batch([segment], None, CPU)).numpy().astype(np.float64)


def places(models: Models, text: list[int], prompt_length: int, num: int) -> Iterator[Place]:
    """Spread over an answer, the last first, so that what a slot holds is there for those that follow."""
    slots = [KVSlot(model.skeleton.kv_shape(), len(text) + 1024, CPU) for model in models[:2]]
    for model, slot in zip(models[:2], slots, strict=True):
        read_on(model, slot, text)
    for length in np.linspace(prompt_length, len(text) - 1, num).astype(int)[::-1].tolist():
        for slot in slots:
            slot.roll_back(length)
        yield Place(text, length, *slots)


class Tally:
    """Tokens a round of one kind of trees, prompt by prompt."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[float]] = {rule: [] for rule in RULES}

    def add(self, of_prompt: tuple[float, ...]) -> None:
        """Means over a prompt's places, by rule."""
        for rule, tokens in zip(RULES, of_prompt, strict=True):
            self.tokens[rule].append(tokens)

    def row(self, tree: str, seed: int) -> dict[str, object]:
        """Means over prompts, and ratios to the first rule."""
        row: dict[str, object] = {"tree": tree}
        for rule, tokens in self.tokens.items():
            ratios = (np.array(tokens) / np.array(self.tokens[RULES[0]])).tolist()
            of_rule = {"tokens": np.mean(tokens), "ratio": np.mean(ratios), "half_width": interval(ratios, seed)}
            row[rule] = {name: round(float(figure), 4) for name, figure in of_rule.items()}
        return row


def compared(
    models: Models,
    bench: Bench,
    texts: list[list[int]],
    shapes: dict[str, StaticShape],
    params: SamplingParams,
    num_places: int,
) -> list[dict[str, object]]:
    """A row for each shape."""
    tallies = {name: Tally() for name in shapes}
    for index, (text, prompt) in enumerate(zip(texts, models.prompts, strict=True)):
        judged = {name: np.zeros(len(SCHEMES)) for name in shapes}
        lengths = []
        for number, place in enumerate(places(models, text, len(prompt), num_places)):
            lengths.append(place.length)
            for name, shape in shapes.items():
                tree = drafted(models, place, shape, params, params.seed * 1_000_000 + index * num_places + number)
                judged[name] += [mean_tokens(tree, scheme, params) for scheme in SCHEMES]
        seeds = replace(params, seed=params.seed * 1_000_000 + index * num_places * SEEDS)
        streams = streams_at(text, len(prompt), lengths, seeds)
        for name, shape in shapes.items():
            tallies[name].add((*judged[name] / num_places, under_shared_noise(bench, streams, shape.budget)))
        bench.release(streams)
    rows = [tally.row(name, params.seed) for name, tally in tallies.items()]
    for row in rows:
        print(params.temperature, row, flush=True)
    return rows


def streams_at(text: list[int], prompt_length: int, lengths: Sequence[int], params: SamplingParams) -> list[Stream]:
    """SEEDS of each place, which is the last token of their text; no two have a seed in common."""
    return [
        Stream(f"place-{number}", text[: length + 1], prompt_length, replace(params, seed=params.seed + number))
        for number, length in enumerate(np.repeat(lengths, SEEDS).tolist())
    ]


def under_shared_noise(bench: Bench, streams: Sequence[Stream], nodes: int) -> float:
    """Tokens of a round of the default scheme, mean over streams."""
    plan = TreePlan(grown_best_first(np.zeros((1, 1)), nodes), Scheme.TARGET, Guess.SAMPLE)
    return float(np.mean([len(verdict.accepted_nodes) + 1 for _, verdict in bench.round(streams, plan)]))


def main() -> None:
    """Prints a line for each temperature and shape, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.6, 1.0])
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 16, 64])
    parser.add_argument("--drop-layers", default="3,14", help="of the substitute")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--places", type=int, default=8, help="of each prompt's answer")
    parser.add_argument("--length", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    ensure_demonstration(0)
    folder = demonstration_folder(0)
    models = Models.load(folder, parse_layers(arguments.drop_layers), arguments.prompts)
    flags = ["--model", str(folder), "--drop-layers", arguments.drop_layers, "--bits", "16", "--max-context", "1024"]
    worker = DraftWorker(parse(DraftConfig, "bench", flags, {}), "bench")
    bench = Bench(worker, LazyTarget(folder, 1024), models.prompts, arguments.length)
    results: dict[str, object] = {}
    for temperature in arguments.temperatures:
        params = SamplingParams(temperature=temperature, seed=arguments.seed)
        texts = models.texts(arguments.length, params)
        pairs = [pair_of(both, params) for both in from_models(models, texts)]
        rng = np.random.default_rng(arguments.seed)
        acceptance = gains_of([one_after_another(pair, RANKS, rng, num=20) for pair in pairs]).mean(0, keepdims=True)
        shapes = {"chain of 8": StaticShape(tuple(range(7)))}
        shapes |= {f"{nodes} nodes": best_shape(acceptance, nodes, LEVELS) for nodes in arguments.nodes}
        results[str(temperature)] = compared(models, bench, texts, shapes, params, arguments.places)
    worker.close()
    print(json.dumps(results | {"seed": arguments.seed, "prompts": arguments.prompts, "places": arguments.places}))


if __name__ == "__main__":
    main()
