"""Traversal verification: exact by enumeration, more accepted than token by token, block verification on chains."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.trees.tree import DraftProbs, Tree
from bough.trees.tree_plan import Scheme
from orchestrator.sizing.plans import merged
from target_worker.verification.verdict import distributions_after
from tests.target_worker.verification.test_verify import Support, all_draws, pairs

LENGTH, VOCAB = 3, 4
SHAPES = {"chain": (-1, 0, 1), "tree": (-1, 0, 0, 1), "two and two": (-1, 0, 0, 1, 2)}
FROM_THE_TEXT = Tree.of([0, 3, 1, 2, 0], [-1, 0, 1, 0, 3], [0.0] * 5)  # the draft never takes 3; the rest it may
Text = tuple[int, ...]


class World:
    """Small tables of what a target and a draft say after a text; the draft never takes the last token."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        texts = [text for length in range(LENGTH) for text in np.ndindex((VOCAB,) * length)]
        self.target = {text: rng.dirichlet(np.ones(VOCAB)) for text in texts}
        weights = {text: rng.dirichlet(np.ones(VOCAB - 1)).astype(np.float32) for text in texts}
        tokens = np.arange(VOCAB - 1, dtype=np.int32)
        self.draft: dict[Text, Support] = {text: (tokens, weights[text]) for text in texts}

    def trees(self, parents: Sequence[int]) -> Iterator[tuple[Tree, float]]:
        """All that the draft can draw in a shape, and how probable each is."""
        nums = {node: parents.count(node) for node in range(len(parents)) if node in parents}

        def drawn(texts: dict[int, Text], probability: float) -> Iterator[tuple[dict[int, Text], float]]:
            node = next((node for node in nums if parents.index(node) not in texts), None)
            if node is None:
                yield texts, probability
                return
            first = parents.index(node)
            for tokens, chance in all_draws(self.draft[texts[node]], nums[node], VOCAB):
                below = {first + i: (*texts[node], token) for i, token in enumerate(tokens)}
                yield from drawn({**texts, **below}, probability * chance)

        for texts, probability in drawn({0: ()}, 1.0):
            tokens = [0, *(texts[node][-1] for node in range(1, len(parents)))]
            tree = Tree.of(tokens, parents, [0.0] * len(parents))
            supports = DraftProbs.joined({node: self.draft[texts[node]] for node in nums})
            yield Tree(tree.tokens, tree.parents, tree.log_probs, supports), probability

    def walks(self, tree: Tree, scheme: Scheme) -> Iterator[tuple[Text, float]]:
        """All that may become of a tree: accepted tokens and the one after them, and how probable that is."""

        def text_of(node: int) -> Text:
            return tuple(tree.tokens[tree.path(node)[1:]].tolist())

        distribution, children = (
            distributions_after(tree, scheme, lambda node: self.target[text_of(node)]),
            tree.children(),
        )

        def below(node: int, probability: float) -> Iterator[tuple[Text, float]]:
            text = text_of(node)
            for token, chance in enumerate(distribution(node, self.target[text]).tolist()):
                if token in children[node]:
                    yield from below(children[node][token], probability * chance)
                else:
                    yield (*text, token), probability * chance

        return below(0, 1.0)

    def chance(self, text: Text, begin: int = 0) -> float:
        """Of the rest of a text in plain decoding."""
        return float(np.prod([self.target[text[:place]][text[place]] for place in range(begin, len(text))]))

    def mean_tokens(self, parents: Sequence[int], scheme: Scheme) -> float:
        """Of a round."""
        return sum(
            probability * chance * len(text)
            for tree, probability in self.trees(parents)
            for text, chance in self.walks(tree, scheme)
        )


@pytest.mark.parametrize("scheme", [Scheme.WITHOUT_REPLACEMENT, Scheme.TRAVERSAL])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_additions", [False, True])
def test_texts_over_all_trees_have_the_targets_distribution(
    seed: int, shape: str, scheme: Scheme, has_additions: bool
) -> None:
    """Without a random number: what a round says, and after it plain decoding."""
    world, distribution = World(seed), defaultdict[Text, float](float)
    for sample, probability in world.trees(SHAPES[shape]):
        tree = merged(sample, FROM_THE_TEXT, len(sample)) if has_additions else sample
        tree.validate(VOCAB, 20, scheme)
        assert (len(tree) > len(sample)) == has_additions
        for text, chance in world.walks(tree, scheme):
            for rest in itertools.product(range(VOCAB), repeat=LENGTH - len(text)):
                distribution[*text, *rest] += probability * chance * world.chance((*text, *rest), len(text))
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        assert distribution[text] == pytest.approx(world.chance(text), abs=1e-9)  # weights travel as float32


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_whole_paths_accept_more(seed: int, shape: str) -> None:
    schemes = Scheme.TRAVERSAL, Scheme.WITHOUT_REPLACEMENT
    by_path, by_token = (World(seed).mean_tokens(SHAPES[shape], scheme) for scheme in schemes)
    assert by_path > by_token + 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_on_a_chain_it_equals_block_verification(seed: int) -> None:
    """As arXiv 2403.10444, algorithm 2, has it: the longest prefix whose own number is below its threshold."""
    world, mean = World(seed), 0.0
    for first, second in itertools.product(range(VOCAB - 1), repeat=2):
        draft = [world.draft[()][1].astype(float), world.draft[first,][1].astype(float)]
        target, tokens = [world.target[()], world.target[first,]], (first, second)
        path, thresholds, probability = 1.0, [], 1.0
        for place in range(2):
            draft[place] /= draft[place].sum()
            probability *= draft[place][tokens[place]]
            path = min(1.0, path * target[place][tokens[place]] / draft[place][tokens[place]])
            if place == 0:
                left = path * world.target[first,]
                left[:-1] = np.maximum(left[:-1] - world.draft[first,][1] / world.draft[first,][1].sum(), 0.0)
                thresholds.append(left.sum() / (left.sum() + 1.0 - path))
            else:
                thresholds.append(path)
        longer = thresholds[1]
        mean += probability * (1.0 + (1.0 - (1.0 - thresholds[0]) * (1.0 - longer)) + longer)
    assert world.mean_tokens(SHAPES["chain"], Scheme.TRAVERSAL) == pytest.approx(mean, abs=1e-6)


@given(some=st.lists(pairs(max_vocab=6), min_size=1, max_size=4), data=st.data())
def test_no_draft_causes_a_nan(some: list[tuple[np.ndarray, Support]], data: st.DataObject) -> None:
    """Of chains of any length: one-hot, disjoint, equal, with vanishing and with enormous weights."""
    vocab_size = max(len(target_probs) for target_probs, _ in some)
    targets = [np.pad(target_probs, (0, vocab_size - len(target_probs))) for target_probs, _ in some]
    targets.append(targets[0])  # after the leaf
    tokens = [int(data.draw(st.sampled_from(support[0].tolist()))) for _, support in some]
    supports = DraftProbs.joined({node: support for node, (_, support) in enumerate(some)})
    chain = Tree.of([0, *tokens], range(-1, len(some)), [0.0] * (len(some) + 1))
    tree = Tree(chain.tokens, chain.parents, chain.log_probs, supports)
    distribution = distributions_after(tree, Scheme.TRAVERSAL, targets.__getitem__)
    for node in range(len(tree)):
        probs = distribution(node, targets[node])
        assert np.isfinite(probs).all()
        assert (probs >= 0).all()
        assert probs.sum() == pytest.approx(1.0, abs=1e-9)
