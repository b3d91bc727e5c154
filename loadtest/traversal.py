"""What verification that looks at whole paths accepts beyond verification token by token, without any timing.

    python -m loadtest.traversal

Traversal verification (arXiv 2505.12398) judges a tree from its leaves to its root, by the probability of whole paths;
of a chain it is block verification (arXiv 2403.10444), than which no exact rule accepts more there. Trees of
Sequoia's kind are drawn by the demonstration pair's draft below places of texts that the target sampled, each in the
best shape for the pair's acceptance by rank, and each is judged many times in both ways. Below the same places stand
bough's own trees: best-first, of as many nodes, of what is likely under the noise that the target draws with, for
several seeds. Ends with one JSON line: tokens per round by temperature and nodes, and traversal's and shared noise's
over Sequoia's with their 95 % half-widths (bootstrap over prompts).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.commands.up import ensure_demonstration
from bough.config import DraftConfig, parse
from bough.demonstration import demonstration_folder
from bough.draft_probs import normalised
from bough.growth import Guess, Scheme, StaticShape, TreePlan
from bough.model.batch import Batch, Segment
from bough.model.draw import Row, probabilities
from bough.model.kv import KVSlot
from bough.model.runner import ResidentModel
from bough.model.sample import draft_weights, without_replacement
from bough.sampling import SamplingParams
from bough.shapes import best_shape
from bough.tree import Tree
from bough.values import parse_layers
from draft_worker.worker import DraftWorker
from loadtest.acceptance import grown_best_first
from loadtest.acceptance_bench import Bench, Stream
from loadtest.acceptance_report import interval
from loadtest.acceptance_target import LazyTarget
from loadtest.chains import LEVELS, RANKS, gains_of
from loadtest.scheme_pairs import CPU, MAX_TOKENS, Models, from_models, pair_of, read_on
from loadtest.scheme_rates import Pair, one_after_another

RULES = ("token by token", "traversal", "shared noise")
JUDGEMENTS = 40  # of each tree, in each way
SEEDS = 4  # of shared noise, at each place


@dataclass(frozen=True, eq=False)
class Drafted:
    """A node of a tree, with what both models say of the token after it."""

    pair: Pair
    children: list[tuple[int, Drafted]]  # index among the pair's tokens, in the order drawn

    @cached_property
    def laws(self) -> list[tuple[Row, Row]]:
        """The target's and the draft's law at each draw, where those before were refused token by token, and after."""
        laws = [(self.pair.target_probs, self.pair.draft_probs)]
        for index, _ in self.children:
            target, draft = laws[-1]
            laws.append((residual(1.0, target, draft)[1], without(draft, index)))
        return laws


def token_by_token(node: Drafted, rng: np.random.Generator) -> tuple[int, ...]:
    """What is accepted by Sequoia's rule (arXiv 2402.12374, algorithm 2), and the token after it; as indices."""
    for (index, child), (target, draft) in zip(node.children, node.laws, strict=False):
        if rng.random() * draft[index] < target[index]:
            return index, *token_by_token(child, rng)
    return (drawn(node.laws[-1][0], rng),)


def traversal(node: Drafted, rng: np.random.Generator, accepted: float = 1.0) -> tuple[int, ...]:
    """The same by arXiv 2505.12398, algorithm 2, below a node that is there with probability `accepted`.

    Empty where that node is refused itself, as a root, there with probability 1, never is.
    """
    target, draft = node.pair.target_probs, node.pair.draft_probs
    for index, child in node.children:
        below = traversal(child, rng, min(1.0, accepted * target[index] / draft[index]))
        if below:
            return index, *below
        accepted, target = residual(accepted, target, draft)
        draft = without(draft, index)
    return (drawn(target, rng),) if rng.random() < accepted else ()


def drawn(probs: Row, rng: np.random.Generator) -> int:
    """An index with these probabilities."""
    return min(int(np.searchsorted(np.cumsum(probs), rng.random(), side="right")), len(probs) - 1)


def residual(accepted: float, target: Row, draft: Row) -> tuple[float, Row]:
    """What is left when a draw is refused: the probability of being there, and the target's law then."""
    left = accepted * target
    left[: len(draft)] = np.maximum(left[: len(draft)] - draft, 0.0)
    total = left.sum()
    if total == 0.0:
        return 0.0 if accepted < 1.0 else 1.0, target
    return total / (total + (1.0 - accepted)), left / total


def without(draft: Row, index: int) -> Row:
    """A draft's law once it has drawn this token."""
    draft = draft.copy()
    draft[index] = 0.0
    return draft / total if (total := draft.sum()) > 0.0 else draft


class Place(NamedTuple):
    """Where a tree is drawn: a slot of each model holds the text before `text[length]`, which is the root."""

    text: Sequence[int]
    length: int
    target_slot: KVSlot
    draft_slot: KVSlot


def drafted(models: Models, place: Place, shape: StaticShape, params: SamplingParams, seed: int) -> Drafted:
    """A tree, its children drawn without replacement."""
    parents, depths = np.array([-1, *shape.parents]), np.array(shape.depths())
    tokens, rng = np.full(len(parents), place.text[place.length]), np.random.default_rng(seed)
    logits: dict[int, Row] = {}  # the draft's, of nodes that have children
    for depth in range(depths.max()):
        begin, end = np.searchsorted(depths, (depth, depth + 1))
        rows = _logits(models.draft, _segment(place.draft_slot, place, tokens, parents).part(begin, end))
        for node in np.unique(parents[depths == depth + 1]).tolist():
            logits[node] = rows[node - begin]
            candidates, weights = draft_weights(logits[node], params, MAX_TOKENS)
            below = np.flatnonzero(parents == node)[: len(candidates)]
            tokens[below] = without_replacement(candidates, normalised(weights), len(below), len(candidates), rng)
    rows = _logits(models.target, _segment(place.target_slot, place, tokens, parents))

    def node_of(node: int) -> Drafted:
        if node not in logits:
            return Drafted(Pair(probabilities(rows[node], params), np.empty(0)), [])
        candidates = draft_weights(logits[node], params, MAX_TOKENS)[0].tolist()
        children = np.flatnonzero(parents == node)[: len(candidates)].tolist()
        pair = pair_of((rows[node], logits[node]), params)
        return Drafted(pair, [(candidates.index(tokens[child]), node_of(child)) for child in children])

    return node_of(0)


def _segment(slot: KVSlot, place: Place, tokens: NDArray[np.int64], parents: NDArray[np.int64]) -> Segment:
    tree = Tree.of(tokens.tolist(), parents.tolist(), [0.0] * len(parents))
    return Segment.tree(slot, place.length, tree)


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
    tallies, rng = {name: Tally() for name in shapes}, np.random.default_rng(params.seed)
    for index, (text, prompt) in enumerate(zip(texts, models.prompts, strict=True)):
        judged = {name: np.zeros(2) for name in shapes}
        lengths = []
        for number, place in enumerate(places(models, text, len(prompt), num_places)):
            lengths.append(place.length)
            for name, shape in shapes.items():
                tree = drafted(models, place, shape, params, params.seed * 1_000_000 + index * num_places + number)
                for _ in range(JUDGEMENTS):
                    judged[name] += len(token_by_token(tree, rng)), len(traversal(tree, rng))
        seeds = replace(params, seed=params.seed * 1_000_000 + index * num_places * SEEDS)
        streams = streams_at(text, len(prompt), lengths, seeds)
        for name, shape in shapes.items():
            by_rule = judged[name] / num_places / JUDGEMENTS
            tallies[name].add((*by_rule, under_shared_noise(bench, streams, shape.budget)))
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
