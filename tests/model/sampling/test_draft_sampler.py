"""What a draft samples from and with: against plain definitions, and by statistics."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import InvalidRequest, Unavailable
from bough.model.sampling.draft_sampler import generator, without_replacement
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree import normalised
from draft_worker.candidates.candidates import Guessing
from tests.fakes.draft_weights import draft_weights

LOGITS = np.array([0.5, 2.0, -1.0, 1.0, -3.0, 0.0])
TOKENS = np.array([4, 1, 3], np.int32)
PROBS = np.array([0.5, 0.3, 0.2])
NUM = 20_000


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_weights_are_the_largest_of_the_filtered_distribution_and_above_0() -> None:
    tokens, weights = draft_weights(LOGITS, SamplingParams(temperature=0.5, top_k=4), 3)
    assert tokens.tolist() == [1, 3, 0]
    exps = np.exp(LOGITS / 0.5)[[1, 3, 0]]
    assert normalised(weights) == pytest.approx(exps / exps.sum())
    assert draft_weights(LOGITS, SamplingParams(top_k=2), 64)[0].tolist() == [1, 3]
    assert draft_weights(np.array([0.0, -np.inf, 1.0, -1e5]), SamplingParams(), 64)[0].tolist() == [2, 0]


@pytest.mark.parametrize("vocab_size", [2, 6, 500])
def test_at_temperature_0_children_are_the_best_in_order(vocab_size: int) -> None:
    logits = np.random.default_rng(1).normal(size=vocab_size)
    tokens, weights = draft_weights(logits, SamplingParams(temperature=0.0), 64)
    assert np.isfinite(weights).all()
    assert (weights > 0).all()
    best = np.argsort(-logits)
    num = min(4, vocab_size)
    for round_ in range(20):
        rng = generator(1, round_, 0)
        drawn = without_replacement(tokens, normalised(weights), num, vocab_size, rng)
        assert drawn.tolist() == best[:num].tolist()


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.5}, {"top_p": 0.95}, {"top_k": 7}, {"min_p": 0.01}, {"temperature": 0.0}, {}]
)
def test_many_nodes_are_weighted_like_single_ones(filters: dict[str, float]) -> None:
    """Filters see all tokens that are considered, more than are kept of them."""
    rng = np.random.default_rng(1)
    values = -np.sort(0.8 * np.log(np.arange(1, 257)) + rng.gumbel(size=(5, 256)), axis=1).astype(np.float32)
    tokens = np.stack([rng.permutation(5000)[:256] for _ in values]).astype(np.int32)
    params = SamplingParams(**filters)
    found = Guessing(params, 0, True, False).candidates(values, tokens, np.zeros(5, np.int32))
    for row in range(len(values)):
        places, weights = draft_weights(values[row].astype(np.float64), params, 64)
        kept = np.isfinite(found.log_probs[row])
        assert found.tokens[row][kept].tolist() == tokens[row][places].tolist()
        assert np.exp(found.log_probs[row][kept]) == pytest.approx(weights, rel=1e-5)


def test_nan_logits_are_an_error() -> None:
    with pytest.raises(Unavailable, match="draft's logits are not numbers"):
        draft_weights(np.array([0.0, np.nan]), SamplingParams(), 8)


def test_a_request_that_bans_all_the_drafts_tokens_is_not_the_drafts_fault() -> None:
    with pytest.raises(InvalidRequest, match="must leave a token of the draft's vocabulary"):
        draft_weights(np.full(2, -np.inf), SamplingParams(), 8)


def test_sampling_without_replacement_equals_successive_draws() -> None:
    """Chi-square with 5 degrees of freedom; passed by chance once in 10^9."""
    drawn = without_replacement(np.tile(TOKENS, (NUM, 1)), np.tile(PROBS, (NUM, 1)), 2, 6, generator(3, 0, 0))
    counts = Counter(map(tuple, drawn.tolist()))
    pairs = list(itertools.permutations(range(3), 2))
    probs = np.array([PROBS[i] * PROBS[j] / (1 - PROBS[i]) for i, j in pairs])
    assert sum(counts.values()) == sum(counts[int(TOKENS[i]), int(TOKENS[j])] for i, j in pairs)
    assert chi_square(np.array([counts[int(TOKENS[i]), int(TOKENS[j])] for i, j in pairs]), probs) < 52


def test_an_exhausted_sample_continues_with_the_other_tokens() -> None:
    """All of the vocabulary in the end; a token of probability 0 comes no sooner than one that is not listed."""
    counts = np.zeros(6)
    for index in range(4000):
        drawn = without_replacement(TOKENS, np.array([0.6, 0.4, 0.0]), 9, 6, generator(3, 1, index))
        assert sorted(drawn.tolist()) == list(range(6))
        assert set(drawn[:2].tolist()) == {4, 1}
        counts[drawn[2]] += 1
    assert chi_square(counts[[0, 2, 3, 5]], np.full(4, 0.25)) < 46


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 2), st.integers(0, 2**31))
def test_rounds_and_positions_do_not_share_random_numbers(seed: int, round_: int, index: int) -> None:
    """It does not depend on the noise that the text is drawn with, at any position."""

    def raw(round_: int, index: int) -> set[int]:
        return set(generator(seed, round_, index).bit_generator.random_raw(32).tolist())

    mine = raw(round_, index)
    assert mine == raw(round_, index)
    assert not mine & (raw(round_ + 1, index) | raw(round_, index + 1))
    noise = (np.random.Philox(key=seed, counter=[0, position, 0, 0]).random_raw(32) for position in (index, index + 1))
    assert not mine & set(np.concatenate(list(noise)).tolist())


@given(
    st.lists(st.floats(-50, 50) | st.just(-np.inf), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.3, 1.5]),
    st.sampled_from([{}, {"top_p": 0.8}, {"top_k": 2}, {"min_p": 0.2}]),
    st.booleans(),
)
def test_candidates_have_log_probabilities_for_any_logits(
    values: list[float], temperature: float, filters: dict[str, float], is_perturbed: bool
) -> None:
    """Descending ones of a draft's row; those without a chance, and rows without any, are -inf, and nothing is NaN."""
    row = np.sort(np.array(values, np.float32))[None, ::-1]
    params = SamplingParams(temperature=temperature, seed=3, **filters)
    guessing = Guessing(params, 0, is_sample=False, is_perturbed=is_perturbed and temperature > 0)
    tokens = np.arange(len(values), dtype=np.int32)[None]
    found = guessing.candidates(row, tokens, np.array([7], np.int32))
    assert not np.isnan(found.log_probs).any()
    assert (found.log_probs <= 0).all()
    possible = found.tokens[0][np.isfinite(found.log_probs[0])]
    assert np.isfinite(row[0, possible]).all()
    assert np.exp(found.log_probs.astype(np.float64)).sum() == pytest.approx(float(len(possible) > 0), abs=1e-5)
    assert (len(possible) > 0) == bool(np.isfinite(row).any())
