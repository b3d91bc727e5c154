"""The distribution of two served tokens: from the draft's own engine, over the wire, to the target's own verdict.

`test_exactness` verifies trees that it builds itself. Here the trees are those that serve, and so are all random
numbers: a text depends only on its seed. A seed's draws decide its tree, and a tree the distribution of what follows.
So each tree is grown, sent and looked through for the first seed that draws it, and holds for all the others; and
the first seeds' texts are made once more by the parts as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from bough.model.batch.batch import Batch
from bough.model.sampling.draft_sampler import generator, without_replacement
from bough.model.sampling.sampler import filtered, gumbel, probabilities
from bough.pb import common_pb2
from bough.protocol.codec import tree_from_wire, tree_to_wire
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Context, VerifyCall
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree import Tree, normalised
from bough.trees.tree_plan import Scheme, StaticShape, TreePlan
from draft_worker.candidates.candidates import Guessing
from draft_worker.growth.static_shape import weights_of
from draft_worker.model.model_draft import largest
from target_worker.verification.verdict import compute_verdict, distributions_after
from tests.fakes.chi_square import fit
from tests.fakes.draft import VOCAB, FakeModel, grow_call, grow_now, new_engine
from tests.pipeline.test_exactness import ALLOWED, NUM_DRAWS, NUM_SERVED_TESTS, SAMPLED

SHAPE = StaticShape((0, 0, 1, 1, 2, 2))
PROMPT = [3, 1, 0]  # the last of them is the root
ROOT = PROMPT[-1]
TEMPERATURE = 0.8
NUM_POSSIBLE = (3, 2)  # tokens that the draft may draw, after even tokens and after odd ones
NUM_WHOLE = 100  # seeds whose texts are made once more
NUM_DISTRIBUTIONS = 2  # of a scheme: of the first token, and of the first two
assert NUM_DISTRIBUTIONS * len(Scheme) <= NUM_SERVED_TESTS


def _logits() -> tuple[np.ndarray, np.ndarray]:
    """The target's and the draft's, (VOCAB, VOCAB) each: row i holds those after token i."""
    rng = np.random.default_rng(2969)  # one by which first and second draws are accepted after every token
    target, draft = rng.normal(0, 1.5, (2, VOCAB, VOCAB))
    for token, row in enumerate(draft):
        row[np.argsort(-row)[NUM_POSSIBLE[token % 2] :]] = -np.inf
    return target, draft.astype(np.float32)


TARGET, DRAFT = _logits()
TARGET_PROBS = np.stack([probabilities(row, SamplingParams(temperature=TEMPERATURE)) for row in TARGET])


class LastTokenModel(FakeModel):
    """A draft that looks at the last token only."""

    def logits(self, batch: Batch) -> torch.Tensor:
        rows = [DRAFT[segment.tokens] for segment in batch.segments if segment.wants_logits]
        return torch.from_numpy(np.concatenate([np.zeros((0, VOCAB), np.float32), *rows]))


ENGINE = new_engine(LastTokenModel())


@cache
def served_tree(text: tuple[int, ...], scheme: Scheme, seed: int, round_: int) -> Tree:
    """As the target receives it."""
    params = SamplingParams(temperature=TEMPERATURE, seed=seed)
    call = grow_call([*text], sampling=params, plan=TreePlan(SHAPE, scheme), round_=round_)
    sent = tree_to_wire(grow_now(ENGINE, call).tree).SerializeToString()
    tree = tree_from_wire(common_pb2.Tree.FromString(sent))
    tree.validate(VOCAB, SHAPE.budget, scheme)
    return tree


def served_text(scheme: Scheme, seed: int) -> list[int]:
    """Two tokens, round by round, by the parts as they are."""
    params, text, number = SamplingParams(temperature=TEMPERATURE, seed=seed), [*PROMPT], 0
    while len(text) < len(PROMPT) + 2:
        tree = served_tree(tuple(text), scheme, seed, number)
        call = VerifyCall(Context.of(ScopedId("s"), text, 0, len(PROMPT)), 1, number, tree, params, scheme)
        verdict = compute_verdict(call, text[:-1], lambda path, tokens=tree.tokens: TARGET[tokens[path[-1]]])
        text, number = [*text, *verdict.tokens_of(tree)], number + 1
    return text[len(PROMPT) :][:2]


def of_all_seeds(bits: np.random.BitGenerator, draw: Callable[[], np.ndarray]) -> np.ndarray:
    """(NUM_DRAWS, ...) what comes of numbers that are keyed by each seed: making all the keys' own takes long."""
    state, drawn = bits.state, []
    for seed in range(NUM_DRAWS):
        state["state"]["key"][0] = seed
        bits.state = state
        drawn.append(draw())
    return np.stack(drawn)


@cache
def noise(index: int) -> np.ndarray:
    """(NUM_DRAWS, VOCAB) with which the target draws the token of this index."""
    bits = np.random.Philox(key=0, counter=[0, len(PROMPT) + index, 0, 0])
    return gumbel(of_all_seeds(bits, lambda: bits.random_raw(VOCAB)))


class Replayed:
    """Exponential numbers that have been drawn, a row for each text; it may take fewer than there are."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers

    def standard_exponential(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._numbers[:, : math.prod(shape[1:])].reshape(shape)


@cache
def exponentials(round_: int, level: int) -> np.ndarray:
    """(NUM_DRAWS, as many as any scheme takes) numbers of the draft."""
    rng, num_children = generator(0, round_, level), 2 ** (level + 1)
    return of_all_seeds(rng.bit_generator, lambda: rng.standard_exponential(num_children * VOCAB))


def sampled_children(tokens: np.ndarray, scheme: Scheme, numbers: np.ndarray) -> np.ndarray:
    """(*tokens.shape, 2) children of nodes with these tokens; the first axis is that of texts."""
    call = grow_call(PROMPT, sampling=SamplingParams(temperature=TEMPERATURE), plan=TreePlan(SHAPE, scheme))
    values, ranked = largest(torch.from_numpy(DRAFT), VOCAB)
    candidates = Guessing.of(call).candidates(values, ranked, np.zeros(VOCAB, np.int32))
    choices, probs = candidates.tokens[tokens], normalised(weights_of(candidates))[tokens]
    rng: Any = Replayed(numbers)
    return without_replacement(choices, probs, 2, VOCAB, rng)


class Distributions(NamedTuple):
    """What comes after a tree's root, and what after its children."""

    first: np.ndarray  # (VOCAB,)
    is_child: np.ndarray  # (VOCAB,)
    second: np.ndarray  # (VOCAB, VOCAB) row i: after the child with token i


def served_distributions(tree: Tree, scheme: Scheme) -> Distributions:
    """By the judge's own distributions."""
    distribution = distributions_after(tree, scheme, lambda node: TARGET_PROBS[tree.tokens[node]])
    is_child, second = np.zeros(VOCAB, np.bool_), np.ones((VOCAB, VOCAB))
    for token, node in tree.children()[0].items():
        is_child[token], second[token] = True, distribution(node, TARGET_PROBS[token])
    return Distributions(distribution(0, TARGET_PROBS[tree.tokens[0]]), is_child, second)


def distributions_of_round(
    scheme: Scheme, round_: int, seeds: np.ndarray, roots: np.ndarray, spoilt: Callable[[Tree], Tree]
) -> Distributions:
    """Those of each seed's tree, stacked, below these roots."""
    first = sampled_children(roots, scheme, exponentials(round_, 0)[seeds])
    below = sampled_children(first, scheme, exponentials(round_, 1)[seeds])
    drawn = np.column_stack((roots, first, below.reshape(-1, 4)))
    _, firsts, kinds = np.unique(np.ravel_multi_index(drawn.T, (VOCAB,) * 7), return_index=True, return_inverse=True)
    distributions = []
    for index in firsts.tolist():
        text = (*PROMPT, int(roots[index])) if round_ else tuple(PROMPT)
        distributions.append(served_distributions(spoilt(served_tree(text, scheme, int(seeds[index]), round_)), scheme))
    return Distributions(*(np.stack(part)[kinds] for part in zip(*distributions, strict=True)))


def chosen(probs: np.ndarray, noise_of_each: np.ndarray) -> np.ndarray:
    """(num_texts,) tokens by these distributions and this noise, as `draw_by` chooses them."""
    with np.errstate(divide="ignore"):
        return (np.log(probs) + noise_of_each).argmax(1)


def texts_of(scheme: Scheme, spoilt: Callable[[Tree], Tree] = lambda tree: tree) -> np.ndarray:
    """(NUM_DRAWS, 2) the first tokens of every seed's text."""
    if scheme is Scheme.TARGET:
        rows = np.stack([filtered(row, SamplingParams(temperature=TEMPERATURE)) for row in TARGET])
        first = (rows[ROOT] + noise(0)).argmax(1)
        return np.column_stack((first, (rows[first] + noise(1)).argmax(1)))
    seeds = np.arange(NUM_DRAWS)
    distributions = distributions_of_round(scheme, 0, seeds, np.full(NUM_DRAWS, ROOT), spoilt)
    first = chosen(distributions.first, noise(0))
    second = chosen(distributions.second[seeds, first], noise(1))
    ended = np.flatnonzero(~distributions.is_child[seeds, first])  # the round; the second token comes from another tree
    second[ended] = chosen(distributions_of_round(scheme, 1, ended, first[ended], spoilt).first, noise(1)[ended])
    return np.column_stack((first, second))


def fits(texts: np.ndarray) -> list[float]:
    """Of the first token's distribution and of the first two's, against plain sampling."""
    counts = np.zeros((VOCAB, VOCAB), np.int64)
    np.add.at(counts, tuple(texts.T), 1)
    probs = TARGET_PROBS[ROOT][:, None] * TARGET_PROBS
    return [fit(counts.sum(1), TARGET_PROBS[ROOT]), fit(counts.ravel(), probs.ravel())]


@pytest.fixture(scope="module", autouse=True)
def _numbers() -> Iterator[None]:
    """Numbers of this many seeds take 130 MB, which other tests need not keep."""
    yield
    for kept in (noise, exponentials, served_tree):
        kept.cache_clear()


@pytest.mark.parametrize("scheme", list(Scheme))
def test_served_text_has_the_distribution_of_plain_sampling(scheme: Scheme) -> None:
    texts = texts_of(scheme)
    assert texts[:NUM_WHOLE].tolist() == [served_text(scheme, seed) for seed in range(NUM_WHOLE)]
    assert min(fits(texts)) > ALLOWED


def siblings_by_token(tree: Tree) -> Tree:
    """Wrong: below the first level siblings are sent in the order of their tokens, not in that of their draws."""
    tokens = tree.tokens.copy()
    for child in tree.children()[0].values():
        below = np.flatnonzero(tree.parents == child)
        tokens[below] = np.sort(tokens[below])
    return replace(tree, tokens=tokens)


@pytest.mark.parametrize("scheme", SAMPLED)
def test_siblings_in_another_order_are_detected(scheme: Scheme) -> None:
    """The test of the test above."""
    assert min(fits(texts_of(scheme, siblings_by_token))) < ALLOWED
