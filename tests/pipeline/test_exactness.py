"""Sampled text has the distribution of plain sampling with each verification scheme: chi-square over many draws.

Every statistic is compared with the value that chance passes once in MAX_ERROR / NUM_TESTS, so that all of this file
and of `test_exactness_served` together fail by chance less than once in a million runs (Bonferroni). Cells with an
expectation below 20 are pooled.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from bough.model.sampling.draft_sampler import generator, without_replacement
from bough.model.sampling.sampler import _noisiest, filtered, gumbel_noise, probabilities
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Context, VerifyCall
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree import DraftProbs, Tree, normalised
from bough.trees.tree_plan import Scheme
from target_worker.verification.traversal import Rejected, Traversal
from target_worker.verification.verdict import compute_verdict, distributions_after
from target_worker.verification.verify import Draw, conditional_distribution, draws_at
from tests.fakes.chi_square import fit, tail
from tests.fakes.draft_weights import draft_weights
from tests.fakes.tiers import long_but

VOCAB = 5
LENGTH = 3  # tokens whose joint distribution is compared
NUM_DRAWS = 200_000  # sequences for each case of the grid, in `make test-long`
FEW_DRAWS = 20_000  # in the suite
PARTS = 4  # tokens whose noise is taken of each seed and position, as if from this many seeds
MAX_ERROR, NUM_TESTS = 1e-6, 1100
NUM_SERVED_TESTS = 8  # of them in `test_exactness_served`
FILTERS = ({}, {"top_p": 0.8}, {"top_k": 3}, {"top_p": 0.9, "top_k": 4})
DRAFTS = ("good", "bad", "disjoint", "one-hot", "truncated")
SAMPLED = [Scheme.WITHOUT_REPLACEMENT, Scheme.TRAVERSAL]
Text = tuple[int, ...]
Row = np.ndarray
Rule = Callable[[Row, Iterable[Draw]], Row]
Distributions = Callable[[Tree, Scheme, Callable[[int], Row]], Callable[[int, Row], Row]]


def independently(tokens: np.ndarray, probs: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
    """Draw (..., num) tokens with replacement from `tokens` and their `probs`, (..., num_entries) each."""
    rates = np.repeat(probs[..., None, :], num, -2)
    arrivals = np.divide(
        rng.standard_exponential(rates.shape), rates, out=np.full(rates.shape, np.inf), where=rates > 0
    )
    return np.take_along_axis(tokens, arrivals.argmin(-1), -1)


class World:
    """A random target and a draft, whose distributions depend on all tokens before."""

    def __init__(self, params: SamplingParams, kind: str, seed: int, num_seen: int = LENGTH) -> None:
        self.params = params
        self.kind = kind
        self.seed = seed
        self.num_seen = num_seen  # tokens of the text that matter
        self.logits = cache(self._logits)
        self.target_probs = cache(lambda text: probabilities(self.logits(text), params))
        self.draft = cache(self._draft)

    def _logits(self, text: Text) -> np.ndarray:
        return np.random.default_rng([self.seed, *(token + 1 for token in text[: self.num_seen])]).normal(0, 1.5, VOCAB)

    def _draft(self, text: Text) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and weights."""
        logits = self.logits(text)
        noise = np.random.default_rng([self.seed, 99, *text[: self.num_seen]]).normal(0, 1.5, VOCAB)
        match self.kind:
            case "good":
                return draft_weights(logits + 0.2 * noise, self.params, VOCAB)
            case "bad":
                return draft_weights(noise, SamplingParams(temperature=2.0), VOCAB)
            case "disjoint":
                return draft_weights(-logits, SamplingParams(top_k=2), VOCAB)
            case "one-hot":
                return draft_weights(logits + 0.2 * noise, self.params, 1)
            case _:
                return draft_weights(logits + 0.2 * noise, SamplingParams(temperature=2.0), 2)


def draw_some(world: World, text: Text, scheme: Scheme, num: int, rng: np.random.Generator) -> np.ndarray:
    """(num,) tokens drawn by the draft after a text; for Scheme.TARGET the likeliest."""
    tokens, weights = world.draft(text)
    if scheme.is_sampled:
        return without_replacement(tokens, normalised(weights), num, VOCAB, rng)
    return tokens[:num]


@cache
def build(world: World, text: Text, scheme: Scheme, first: Text, below: Text) -> Tree:
    """A root with the children `first`, of which the first has the child or children `below`."""
    nodes = {token: 1 + index for index, token in enumerate(dict.fromkeys(first))}
    nodes_below = {token: 1 + len(nodes) + index for index, token in enumerate(dict.fromkeys(below))}
    supports = {0: world.draft(text), 1: world.draft((*text, first[0]))}
    return Tree(
        np.array([0, *nodes, *nodes_below], np.int32),
        np.array([-1, *(0 for _ in nodes), *(1 for _ in nodes_below)], np.int32),
        np.zeros(1 + len(nodes) + len(nodes_below), np.float32),
        DraftProbs.joined(supports) if scheme.is_sampled else None,
    )


@cache
def validated(world: World, text: Text, scheme: Scheme, first: Text, below: Text) -> Tree:
    """That of `build`, after the checks that a target makes."""
    tree = build(world, text, scheme, first, below)
    tree.validate(VOCAB, 16, scheme)
    return tree


class Trees(NamedTuple):
    """The same tree, as often as it was grown."""

    tree: Tree
    num: int


def grow_many(world: World, text: Text, scheme: Scheme, num: int, rng: np.random.Generator) -> Iterator[Trees]:
    """`num` trees with two draws below the root, and one below the first of these."""
    tokens, weights = (np.tile(array, (num, 1)) for array in world.draft(text))
    probs = np.tile(normalised(weights[0]), (num, 1))
    if scheme.is_sampled:
        first = without_replacement(tokens, probs, 2, VOCAB, rng)
    else:
        first = independently(tokens, probs, 2, rng)
    below = np.zeros(num, np.int32)
    for token in range(VOCAB):
        rows = np.flatnonzero(first[:, 0] == token)
        choices, chances = world.draft((*text, token))
        below[rows] = independently(choices, normalised(chances), len(rows), rng)
    codes, counts = np.unique((first[:, 0] * VOCAB + first[:, 1]) * VOCAB + below, return_counts=True)
    checked: set[Text] = set()
    for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
        drawn = code // VOCAB**2, code // VOCAB % VOCAB
        make = build if drawn in checked else validated  # below equal children all were drawn equally, just above
        checked.add(drawn)
        yield Trees(make(world, text, scheme, drawn, (code % VOCAB,)), count)


def verify_many(
    world: World, text: Text, trees: Trees, scheme: Scheme, rng: np.random.Generator, distributions: Distributions
) -> Counter[Text]:
    """Committed tokens of as many rounds as there are trees; all that are at a node draw at once."""
    tree, num = trees
    children, outcomes, waiting = tree.children(), Counter[Text](), [(0, text, num)]
    distribution = distributions(
        tree, scheme, lambda node: world.target_probs((*text, *tree.tokens[tree.path(node)[1:]].tolist()))
    )
    while waiting:
        node, path, num = waiting.pop()
        probs = distribution(node, world.target_probs(path))
        assert abs(probs.sum() - 1.0) <= 1e-9
        for token, count in enumerate(rng.multinomial(num, probs / probs.sum()).tolist()):
            if count and token in children[node] and len(path) + 1 < LENGTH:
                waiting.append((children[node][token], (*path, token), count))
            elif count:
                outcomes[*path, token] += count
    return outcomes


def sample_texts(
    world: World, scheme: Scheme, num: int, distributions: Distributions = distributions_after
) -> Counter[Text]:
    """`num` texts of LENGTH tokens, round by round."""
    rng = np.random.default_rng([7, world.seed])
    texts = Counter({(): num})
    for length in range(LENGTH):
        for text in [text for text in texts if len(text) == length]:
            for trees in grow_many(world, text, scheme, texts.pop(text), rng):
                texts += verify_many(world, text, trees, scheme, rng, distributions)
    return texts


def worst_fit(texts: Counter[Text], world: World) -> float:
    """The least of the fits of the first token, the first two and the first three, against plain sampling."""
    fits = []
    for length in range(1, LENGTH + 1):
        keys = list(itertools.product(range(VOCAB), repeat=length))
        counts: Counter[Text] = Counter()
        for text, count in texts.items():
            counts[text[:length]] += count
        probs = [np.prod([world.target_probs(key[:i])[key[i]] for i in range(length)]) for key in keys]
        fits.append(fit(np.array([counts[key] for key in keys]), np.array(probs)))
    return min(fits)


GRID = list(itertools.product(SAMPLED, (0.3, 0.8, 1.2), DRAFTS, range(len(FILTERS))))
TARGET_GRID = list(itertools.product((0.3, 0.8, 1.2), range(len(FILTERS))))
FEW = [case for case in GRID if case[1] == 0.8]  # temperatures only change the target's logits
ALLOWED = MAX_ERROR / NUM_TESTS
assert 2 * (3 * len(GRID) + 3 * len(TARGET_GRID) + 22) + NUM_SERVED_TESTS <= NUM_TESTS
DRAWS = pytest.mark.parametrize("num_draws", long_but([FEW_DRAWS], [FEW_DRAWS, NUM_DRAWS]))


@DRAWS
@pytest.mark.parametrize(("scheme", "temperature", "kind", "filters"), long_but(FEW, GRID))
def test_three_tokens_are_distributed_as_in_plain_sampling(
    scheme: Scheme, temperature: float, kind: str, filters: int, num_draws: int
) -> None:
    params = SamplingParams(temperature=temperature, **FILTERS[filters])
    world = World(params, kind, seed=10 * DRAFTS.index(kind) + filters)
    texts = sample_texts(world, scheme, num_draws)
    assert sum(texts.values()) == num_draws
    assert worst_fit(texts, world) > ALLOWED


@cache
def noise(num_draws: int) -> np.ndarray:
    """(num_draws, LENGTH, VOCAB) at the first positions of a text: that of seeds, and that of their next tokens."""
    positions, num_seeds = range(1, LENGTH + 1), num_draws // PARTS
    drawn = [[gumbel_noise(seed, position, PARTS * VOCAB) for position in positions] for seed in range(num_seeds)]
    by_part = np.reshape(drawn, (num_seeds, LENGTH, PARTS, VOCAB)).transpose(2, 0, 1, 3)
    return by_part.reshape(num_draws, LENGTH, VOCAB)


@DRAWS
@pytest.mark.parametrize(("temperature", "filters"), TARGET_GRID)
def test_target_scheme_follows_the_distribution_of_its_random_numbers(
    temperature: float, filters: int, num_draws: int
) -> None:
    """Its tokens are plain decoding's, seed by seed (test_equality.py): so these alone could make it wrong."""
    params = SamplingParams(temperature=temperature, **FILTERS[filters])
    world = World(params, "good", seed=filters)
    seeds: dict[Text, np.ndarray] = {(): np.arange(num_draws)}  # by what each seed's text is so far
    for index in range(LENGTH):
        for text in list(seeds):
            logits, own = filtered(world.logits(text), params), seeds.pop(text)
            tokens = (logits + noise(num_draws)[own, index]).argmax(1)
            some = own[own < num_draws // PARTS][:20].tolist()
            assert tokens[: len(some)].tolist() == [_noisiest(logits, seed, index + 1) for seed in some]
            seeds.update({(*text, token): own[tokens == token] for token in np.unique(tokens).tolist()})
    assert worst_fit(Counter({text: len(own) for text, own in seeds.items()}), world) > ALLOWED


def without_residual(target_probs: np.ndarray, draws: Iterable[Draw]) -> np.ndarray:
    """Wrong: what is rejected is drawn again from the target itself."""
    mixture, rest = np.zeros_like(target_probs), 1.0
    for token, tokens, probs in draws:
        acceptance = min(1.0, target_probs[token] / float(probs[tokens == token].sum()))
        mixture[token] += rest * acceptance
        rest *= 1 - acceptance
    return mixture + rest * target_probs


def with_stale_draft(target_probs: np.ndarray, draws: Iterable[Draw]) -> np.ndarray:
    """Wrong: the second child is judged as if it had been drawn like the first."""
    listed = list(draws)
    return conditional_distribution(
        target_probs, [Draw(draw.token, listed[0].tokens, listed[0].probs) for draw in listed]
    )


def distributions_by(rule: Rule) -> Distributions:
    """Of schemes that look at one level."""
    return lambda tree, scheme, _: lambda node, probs: rule(probs, draws_at(tree, node, scheme, VOCAB))


class StaleTraversal(Traversal):
    """Wrong: the second child is judged as if it had been drawn like the first."""

    def _draws(self, node: int, vocab_size: int) -> list[Draw]:
        listed = list(super()._draws(node, vocab_size))
        return [Draw(draw.token, listed[0].tokens, listed[0].probs) for draw in listed]


class TraversalOfTokens(Traversal):
    """Wrong: a node's parameter is its token's and not its path's."""

    def _reject_all(self, node: int, target_probs: Row) -> tuple[np.ndarray, Rejected]:
        self._presence[node] = 1.0
        return super()._reject_all(node, target_probs)


def distributions_by_traversal(traversal: type[Traversal]) -> Distributions:
    return lambda tree, _, target_probs: traversal(tree, target_probs).distribution_after


@pytest.mark.parametrize(
    ("distributions", "scheme"),
    [
        (distributions_by(without_residual), Scheme.WITHOUT_REPLACEMENT),
        (distributions_by(with_stale_draft), Scheme.WITHOUT_REPLACEMENT),
        (distributions_by_traversal(StaleTraversal), Scheme.TRAVERSAL),
        (distributions_by_traversal(TraversalOfTokens), Scheme.TRAVERSAL),
    ],
)
def test_a_wrong_distribution_is_detected(distributions: Distributions, scheme: Scheme) -> None:
    """The test of the tests above: what is wrong by a line does not pass."""
    world = World(SamplingParams(temperature=0.8), "bad", seed=1)
    assert worst_fit(sample_texts(world, scheme, FEW_DRAWS, distributions), world) < ALLOWED


class Round(NamedTuple):
    """What a round committed, and how much of it was accepted."""

    tokens: Text
    num_accepted: int


RngOf = Callable[[int, int, int], np.random.Generator]  # of seed, round and index


def play(world: World, scheme: Scheme, seed: int, rng_of: RngOf) -> Iterator[Round]:
    """Rounds of one session as the workers play them: real numbers, real trees, the engine's own judgement."""
    text: Text = ()
    for number in itertools.count():
        first = draw_some(world, text, scheme, 2, rng_of(seed, number, 0))
        below = draw_some(world, (*text, int(first[0])), scheme, 1, rng_of(seed, number, 1))
        tree = validated(world, text, scheme, tuple(first.tolist()), tuple(below.tolist()))
        held = [0, *text]
        context = Context.of(ScopedId("s"), [*held, 0], 0, 1)
        params = SamplingParams(world.params.temperature, world.params.top_k, world.params.top_p, seed=seed)
        tokens = tree.tokens.tolist()
        verdict = compute_verdict(
            VerifyCall(context, 1, number, tree, params, scheme),
            held,
            lambda path, text=text, tokens=tokens: world.logits((*text, *(tokens[node] for node in path[1:]))),
        )
        new = (*(int(tree.tokens[node]) for node in verdict.accepted_nodes), verdict.bonus_token)
        yield Round(new, len(verdict.accepted_nodes))
        text += new


def own_numbers(seed: int, round_: int, index: int) -> np.random.Generator:
    return generator(seed, round_, index)


def same_numbers(seed: int, round_: int, index: int) -> np.random.Generator:
    """Wrong: every round of a session draws the same again, as Sequoia's code does."""
    return generator(seed, 0, index)


@pytest.mark.parametrize("num_seeds", long_but([1_000], [1_000, 4_000]))
@pytest.mark.parametrize("scheme", list(Scheme))
def test_the_engines_own_rounds_follow_the_distribution_over_seeds(scheme: Scheme, num_seeds: int) -> None:
    """Everything for real, numbers included; the grid above draws from numpy's."""
    world = World(SamplingParams(temperature=0.8, top_p=0.9), "bad", seed=3)
    texts: Counter[Text] = Counter()
    for seed in range(num_seeds):
        tokens = itertools.chain.from_iterable(r.tokens for r in play(world, scheme, seed, own_numbers))
        texts[tuple(itertools.islice(tokens, LENGTH))] += 1
    assert worst_fit(texts, world) > ALLOWED


def dependence(pairs: list[tuple[Round, Round]]) -> float:
    """Probability of so much dependence between two rounds by chance: chi-square of their table, rare kinds as one."""
    common = [kind for kind, count in Counter(itertools.chain(*pairs)).items() if count > len(pairs) / 10]
    indices = [[common.index(kind) if kind in common else len(common) for kind in pair] for pair in pairs]
    table = np.zeros((len(common) + 1, len(common) + 1))
    np.add.at(table, tuple(np.array(indices).T), 1)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    return tail(float(((table - expected) ** 2 / np.maximum(expected, 1e-9)).sum()), len(common) ** 2)


@pytest.mark.parametrize("scheme", SAMPLED)
@pytest.mark.parametrize(
    ("rng_of", "num_sessions"),
    [(same_numbers, 300), (own_numbers, 1_000), pytest.param(own_numbers, 3_000, marks=pytest.mark.long)],
)
def test_successive_rounds_are_independent(scheme: Scheme, rng_of: RngOf, num_sessions: int) -> None:
    """In a world without memory a round says nothing of the next, unless numbers are used twice."""
    world = World(SamplingParams(temperature=0.8), "bad", seed=4, num_seen=0)
    sessions = (itertools.islice(play(world, scheme, seed, rng_of), 2) for seed in range(num_sessions))
    chance = dependence([(first, second) for first, second in sessions])
    assert chance > ALLOWED if rng_of is own_numbers else chance < ALLOWED
