"""What verification that looks at whole paths accepts beyond verification token by token, without any timing.

    python -m loadtest.traversal

Traversal verification (arXiv 2505.12398) judges a tree from its leaves to its root, by the probability of whole paths;
of a chain it is block verification (arXiv 2403.10444), than which no exact rule accepts more there. Trees of
Sequoia's kind are drawn by the demonstration pair's draft below places of texts that the target sampled, each in the
best shape for the pair's acceptance by rank, and each is judged many times in both ways. Ends with one JSON line:
tokens per round of both by temperature and nodes, and traversal's over Sequoia's with its 95 % half-width (bootstrap
over prompts).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.acceptance import FloatArray
from bough.commands.up import ensure_demonstration
from bough.demonstration import demonstration_folder
from bough.draft_probs import normalised
from bough.growth import StaticShape
from bough.model.batch import Batch, Segment
from bough.model.draw import Row, probabilities
from bough.model.kv import KVSlot
from bough.model.runner import ResidentModel
from bough.model.sample import draft_weights, without_replacement
from bough.sampling import SamplingParams
from bough.shapes import best_shape
from bough.tree import Tree
from loadtest.acceptance_report import interval
from loadtest.chains import LEVELS, RANKS, gains_of
from loadtest.scheme_pairs import CPU, MAX_TOKENS, Models, from_models, pair_of, read_on
from loadtest.scheme_rates import Pair, one_after_another

JUDGEMENTS = 40  # of each tree, in each way


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


def compared(
    models: Models, texts: list[list[int]], shapes: dict[str, StaticShape], params: SamplingParams, num_places: int
) -> list[dict[str, object]]:
    """A row for each shape."""
    tokens: dict[str, list[FloatArray]] = {name: [] for name in shapes}  # (2,) of each prompt
    rng = np.random.default_rng(params.seed)
    for index, (text, prompt) in enumerate(zip(texts, models.prompts, strict=True)):
        sums = {name: np.zeros(2) for name in shapes}
        for number, place in enumerate(places(models, text, len(prompt), num_places)):
            for name, shape in shapes.items():
                tree = drafted(models, place, shape, params, params.seed * 1_000_000 + index * num_places + number)
                for _ in range(JUDGEMENTS):
                    sums[name] += len(token_by_token(tree, rng)), len(traversal(tree, rng))
        for name, total in sums.items():
            tokens[name].append(total / num_places / JUDGEMENTS)
    rows = []
    for name, each in tokens.items():
        both = np.array(each)
        ratios = (both[:, 1] / both[:, 0]).tolist()
        row = {"token by token": round(float(both[:, 0].mean()), 3), "traversal": round(float(both[:, 1].mean()), 3)}
        row |= {"ratio": round(float(np.mean(ratios)), 4), "half_width": round(interval(ratios, params.seed), 4)}
        rows.append({"tree": name, **row})
        print(params.temperature, rows[-1], flush=True)
    return rows


def main() -> None:
    """Prints a line for each temperature and shape, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.6, 1.0])
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--chain", type=int, default=8, help="nodes of the chain, the root included")
    parser.add_argument("--drop-layers", default="3,14", help="of the substitute")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--places", type=int, default=8, help="of each prompt's answer")
    parser.add_argument("--length", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    ensure_demonstration(0)
    drops = tuple(int(layer) for layer in arguments.drop_layers.split(","))
    models = Models.load(demonstration_folder(0), drops, arguments.prompts)
    results: dict[str, object] = {}
    for temperature in arguments.temperatures:
        params = SamplingParams(temperature=temperature, seed=arguments.seed)
        texts = models.texts(arguments.length, params)
        pairs = [pair_of(both, params) for both in from_models(models, texts)]
        rng = np.random.default_rng(arguments.seed)
        acceptance = gains_of([one_after_another(pair, RANKS, rng, num=20) for pair in pairs]).mean(0, keepdims=True)
        shapes = {f"chain of {arguments.chain}": StaticShape(tuple(range(arguments.chain - 1)))}
        shapes |= {f"{nodes} nodes": best_shape(acceptance, nodes, LEVELS) for nodes in arguments.nodes}
        results[str(temperature)] = compared(models, texts, shapes, params, arguments.places)
    print(json.dumps(results | {"seed": arguments.seed, "prompts": arguments.prompts, "places": arguments.places}))


if __name__ == "__main__":
    main()
