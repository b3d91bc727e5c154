"""Verification given what the draft drew: exact by enumeration, never NaN, and in the engine as in plain decoding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import InvalidTree, Unavailable
from bough.model.sampling.sampler import TokenCounts, adjusted, probabilities
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Context, Verdict, VerifyCall
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree import DraftProbs, Tree, normalised
from bough.trees.tree_plan import Scheme
from target_worker.verification.verdict import compute_verdict, distributions_after

SAMPLED = [Scheme.WITHOUT_REPLACEMENT, Scheme.TRAVERSAL]
Support = tuple[np.ndarray, np.ndarray]  # tokens and weights


def one_level(drawn: Sequence[int], support: Support) -> Tree:
    """A root whose children were drawn in this order."""
    return Tree(
        np.array([0, *drawn], np.int32),
        np.array([-1] + [0] * len(drawn), np.int32),
        np.zeros(len(drawn) + 1, np.float32),
        DraftProbs.joined({0: support}) if len(drawn) else None,
    )


def all_draws(support: Support, num: int, vocab_size: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every outcome of drawing `num` children, and its probability: the definition, token by token."""
    probs = np.zeros(vocab_size)
    probs[support[0]] = normalised(support[1])
    for drawn in itertools.product(range(vocab_size), repeat=num):
        left, probability = probs.copy(), 1.0
        for index, token in enumerate(drawn):
            probability *= left[token]
            if probability:
                left[token] = 0.0
                if left.sum() == 0.0:
                    left[np.setdiff1d(np.arange(vocab_size), drawn[: index + 1])] = 1.0
                left /= max(left.sum(), 1e-300)
        if probability:
            yield drawn, probability


def distribution_at_root(target_probs: np.ndarray, tree: Tree, scheme: Scheme) -> np.ndarray:
    tree.validate(len(target_probs), len(tree), scheme)
    return distributions_after(tree, scheme, lambda _: target_probs)(0, target_probs)


@st.composite
def pairs(draw: st.DrawFn, max_vocab: int = 5) -> tuple[np.ndarray, Support]:
    """A target's probabilities and a draft's support: of any size, often one-hot, often equal, with extreme weights."""
    vocab_size = draw(st.integers(2, max_vocab))
    numbers = st.sampled_from([0.0, 5e-324, 1e-310, 1e-30, 1e-12, 0.1, 0.5, 1.0, 1.0, 3.0, 1e12])
    weights = np.array(draw(st.lists(numbers, min_size=vocab_size, max_size=vocab_size).filter(any)))
    tokens = np.array(draw(st.permutations(range(vocab_size)))[: draw(st.integers(1, vocab_size))], np.int32)
    if draw(st.booleans()):
        own = weights.astype(np.float32)
        kept = tokens[own[tokens] > 0] if own[tokens].any() else tokens
        own = own[kept] if own[tokens].any() else np.ones(len(kept), np.float32)
    else:
        positive = st.floats(np.float32(1e-38), np.float32(1e38), width=32)
        kept, own = tokens, np.array([draw(positive) for _ in tokens], np.float32)
    return weights / weights.sum(), (kept, own)


@pytest.mark.parametrize("scheme", SAMPLED)
@given(pair=pairs(max_vocab=4), num=st.integers(1, 3))
def test_verdicts_over_all_draws_have_the_targets_distribution(
    scheme: Scheme, pair: tuple[np.ndarray, Support], num: int
) -> None:
    """Exactness of one level without a random number: the average over what the draft may draw."""
    target_probs, support = pair
    vocab_size = len(target_probs)
    mean = np.zeros(vocab_size)
    for drawn, probability in all_draws(support, min(num, vocab_size), vocab_size):
        distribution = distribution_at_root(target_probs, one_level(drawn, support), scheme)
        assert np.isfinite(distribution).all()
        assert (distribution >= 0).all()
        assert distribution.sum() == pytest.approx(1.0, abs=1e-12)
        mean += probability * distribution
    assert mean == pytest.approx(target_probs, abs=1e-12)


@pytest.mark.parametrize("scheme", SAMPLED)
@given(pair=pairs(max_vocab=12), data=st.data())
def test_no_draft_causes_a_nan(scheme: Scheme, pair: tuple[np.ndarray, Support], data: st.DataObject) -> None:
    """Also one that lies about what it drew: exhausted, or in an order of vanishing probability."""
    target_probs, support = pair
    others = np.setdiff1d(np.arange(len(target_probs)), support[0]).tolist()
    drawn = [*data.draw(st.permutations(support[0].tolist())), *others]
    drawn = drawn[: data.draw(st.integers(0, len(drawn)))]
    distribution = distribution_at_root(target_probs, one_level(drawn, support), scheme)
    assert np.isfinite(distribution).all()
    assert (distribution >= 0).all()
    assert distribution.sum() == pytest.approx(1.0, abs=1e-9)
    assert distribution[target_probs == 0].sum() < 1e-9


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    probs = np.array([0.5, 0.3, 0.2])
    support = np.arange(3, dtype=np.int32), probs.astype(np.float32)
    exact = normalised(support[1])
    for scheme in SAMPLED:
        assert distribution_at_root(exact, one_level([1], support), scheme).tolist() == [0, 1, 0]


def test_a_second_draw_uses_what_the_first_left() -> None:
    """By hand. Target 0.2, 0.5, 0.3 and draft 0.6, 0.2, 0.2: token 0 passes with 1/3; 0, 0.3, 0.1 are left of it."""
    target_probs = np.array([0.2, 0.5, 0.3])
    support = np.arange(3, dtype=np.int32), np.array([6, 2, 2], np.float32)
    without = distribution_at_root(target_probs, one_level([0, 2], support), SAMPLED[0])
    assert without == pytest.approx([1 / 3, 1 / 3, 1 / 3])  # then 2 passes with 0.25 / 0.5, or else it is 1


def verdict_of(tree: Tree, scheme: Scheme, params: SamplingParams, logits: np.ndarray) -> Verdict:
    context = Context.of(ScopedId("s"), [*range(4), int(tree.tokens[0])], 0, 5)
    call = VerifyCall(context, 1, 0, tree, params, scheme)
    return compute_verdict(call, list(range(4)), lambda path: logits[path[-1]])


@pytest.mark.parametrize("scheme", list(Scheme))
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_tree_of_one_node_is_plain_decoding_with_any_scheme(scheme: Scheme, temperature: float) -> None:
    logits = np.random.default_rng(0).normal(size=(1, 40))
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(30)]
    verdicts = [verdict_of(Tree.root(3), scheme, p, logits) for p in params]
    assert verdicts == [verdict_of(Tree.root(3), Scheme.TARGET, p, logits) for p in params]
    assert len({verdict.bonus_token for verdict in verdicts}) > 1 or temperature == 0.0


@pytest.mark.parametrize("scheme", list(Scheme))
@pytest.mark.parametrize(("min_tokens", "accepted", "bonus"), [(0, [], 4), (1, [1], 4), (2, [1], 2), (9, [1], 2)])
def test_no_stop_token_is_drawn_before_min_tokens(
    scheme: Scheme, min_tokens: int, accepted: list[int], bonus: int
) -> None:
    """Also where the largest logit alone is looked at, which is the stop token's everywhere."""
    logits = np.array([[0.0, 0.1, 5.0, 0.2, 6.0]] * 2)
    params = SamplingParams(temperature=0.0, stop_token_ids=frozenset({4, 3}), min_tokens=min_tokens)
    tree = one_level([2], (np.array([2], np.int32), np.ones(1, np.float32)))
    call = VerifyCall(Context.of(ScopedId("s"), [*range(4), 0], 0, 5), 1, 0, tree, params, scheme)
    for best_after in (lambda _: None, lambda path: int(logits[path[-1]].argmax())):
        verdict = compute_verdict(call, list(range(4)), lambda path: logits[path[-1]], best_after)
        assert (list(verdict.accepted_nodes), verdict.bonus_token) == (accepted, bonus)


@pytest.mark.parametrize("scheme", SAMPLED)
def test_at_temperature_0_the_best_token_follows_whatever_was_drawn(scheme: Scheme) -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        logits = rng.normal(size=(4, 6))
        support = rng.permutation(6)[:4].astype(np.int32), rng.random(4).astype(np.float32) + 1e-3
        tree = one_level(support[0][:3].tolist(), support)
        verdict = verdict_of(tree, scheme, SamplingParams(temperature=0.0), logits)
        best = int(logits[0].argmax())
        if best in tree.tokens[1:]:
            node = tree.children()[0][best]
            assert (verdict.accepted_nodes, verdict.bonus_token) == ((node,), int(logits[node].argmax()))
        else:
            assert (verdict.accepted_nodes, verdict.bonus_token) == ((), best)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SAMPLED)
def test_penalties_bias_and_logprobs_apply_along_the_path(scheme: Scheme) -> None:
    """The distribution below a child is that of plain decoding after its token; a bias bans the last token."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(2, 5))
    params = SamplingParams(temperature=0.8, presence_penalty=1.5, logit_bias={4: -1000.0}, logprobs=2)
    support = np.array([2], np.int32), np.ones(1, np.float32)
    tree = one_level([2], support)
    counts, num_below = np.zeros(5), 0
    for seed in range(1500):
        params = SamplingParams(temperature=0.8, presence_penalty=1.5, logit_bias={4: -1000.0}, logprobs=2, seed=seed)
        verdict = verdict_of(tree, scheme, params, logits)
        assert len(verdict.logprobs) == len(verdict.accepted_nodes) + 1
        raw = logits[len(verdict.accepted_nodes)]
        expected = raw[verdict.bonus_token] - np.log(np.exp(raw).sum())
        assert math.isclose(verdict.logprobs[-1].token.logprob, expected, rel_tol=1e-6)
        if verdict.accepted_nodes:
            counts[verdict.bonus_token] += 1
            num_below += 1
    expected_probs = probabilities(adjusted(logits[1], params, TokenCounts.of([0, 1, 2, 3, 0, 2], 5)), params)
    assert counts[4] == 0
    assert num_below > 75
    stat = ((counts[:4] - expected_probs[:4] * num_below) ** 2 / (expected_probs[:4] * num_below)).sum()
    assert stat < 50  # 3 degrees of freedom: once in 10^10


@pytest.mark.parametrize("scheme", SAMPLED)
def test_nan_logits_are_an_error(scheme: Scheme) -> None:
    tree = one_level([2], (np.array([2], np.int32), np.ones(1, np.float32)))
    with pytest.raises(Unavailable, match="not numbers"):
        verdict_of(tree, scheme, SamplingParams(), np.full((2, 5), np.nan))


def test_trees_that_were_not_sampled_for_the_scheme_are_refused() -> None:
    support = np.array([5, 6], np.int32), np.ones(2, np.float32)
    plain = Tree.of([1, 5], [-1, 0], [0, -1])
    elsewhere = Tree(plain.tokens, plain.parents, plain.log_probs, DraftProbs.joined({1: support}))
    stray = one_level([7], support)
    for tree, scheme, message in (
        (plain, Scheme.WITHOUT_REPLACEMENT, r"tree\.draft_probs: must have .* node 0 .* for without-replacement"),
        (elsewhere, Scheme.WITHOUT_REPLACEMENT, r"tree\.draft_probs: must have .* node 0"),
        (
            stray,
            Scheme.WITHOUT_REPLACEMENT,
            r"tree\.tokens\[1\]: must be a token of tree\.draft_probs of node 0, got 7",
        ),
        (one_level([5, 7], support), SAMPLED[0], r"tree\.tokens\[2\]: must be a token of .* got 7"),
    ):
        tree.validate(10, 4)
        with pytest.raises(InvalidTree, match=message):
            tree.validate(10, 4, scheme)
    one_level([6, 5, 7], support).validate(10, 4, SAMPLED[0])  # 7 came when 5 and 6 were exhausted
