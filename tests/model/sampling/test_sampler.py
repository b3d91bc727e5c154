"""The drawing of tokens: penalties, filters and noise, each against a plain definition or by statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import InvalidRequest, Unavailable
from bough.model.sampling.sampler import (
    TokenCounts,
    adjusted,
    draw,
    filtered,
    gumbel,
    gumbel_noise,
    position_logprobs,
    probabilities,
    within_deviations,
)
from bough.protocol.sampling_params import BANNED, SamplingParams, StopConditions

LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def softmax(logits: np.ndarray) -> np.ndarray:
    exps = np.exp(logits - logits.max())
    return exps / exps.sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.3, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.2),
    ],
)
def test_draws_follow_the_filtered_distribution(params: SamplingParams) -> None:
    """Chi-square over 20,000 positions; the seed is fixed, and the bound is passed by chance once in 10^9."""
    counts = np.zeros(len(LOGITS))
    for position in range(20_000):
        counts[draw(LOGITS, params, position)] += 1
    probs = softmax(filtered(LOGITS, params))
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0] * counts.sum()
    assert ((counts[probs > 0] - expected) ** 2 / expected).sum() < 60


def test_filters_follow_their_definitions() -> None:
    probs = softmax(LOGITS)
    kept = {
        "top_k": np.isfinite(filtered(LOGITS, SamplingParams(top_k=2))),
        "top_p": np.isfinite(filtered(LOGITS, SamplingParams(top_p=0.8))),
        "min_p": np.isfinite(filtered(LOGITS, SamplingParams(min_p=0.2))),
    }
    assert kept["top_k"].tolist() == [True, True, False, False, False, False]
    smallest = next(n for n in range(1, 7) if probs[:n].sum() >= 0.8)
    assert kept["top_p"].tolist() == [True] * smallest + [False] * (6 - smallest)
    assert kept["min_p"].tolist() == (probs >= 0.2 * probs.max()).tolist()


def test_top_n_sigma_keeps_tokens_within_n_deviations_of_the_largest() -> None:
    """As llama.cpp's: banned tokens do not count, temperature changes nothing, and 0 or -1 excludes nothing."""
    logits = np.array([-np.inf, *LOGITS, -np.inf])
    for sigmas in (0.3, 1.0, 1.5, 4.0):
        kept = np.isfinite(within_deviations(logits, SamplingParams(top_n_sigma=sigmas)))
        assert kept.tolist() == [False, *(LOGITS.max() - LOGITS <= sigmas * LOGITS.std()), False]
        for temperature in (0.2, 1.0, 5.0):
            hot = SamplingParams(temperature, top_n_sigma=sigmas)
            assert (probabilities(logits, hot) > 0).tolist() == kept.tolist()
            assert {draw(logits, hot, position) for position in range(300)} <= {*np.flatnonzero(kept)}
    for off in (0.0, -1.0):
        assert within_deviations(logits, SamplingParams(top_n_sigma=off)) is logits
    assert not np.isfinite(within_deviations(np.full(3, -np.inf), SamplingParams(top_n_sigma=1.0))).any()


def test_top_n_sigma_excludes_the_same_tokens_for_a_draft_as_for_the_target() -> None:
    rows = np.random.default_rng(2).normal(size=(5, 300)).astype(np.float32)
    params = SamplingParams(0.8, top_n_sigma=1.2)
    kept = within_deviations(rows, params)
    assert kept.dtype == np.float32
    for row, expected in zip(kept, rows, strict=True):
        assert np.isfinite(row).tolist() == np.isfinite(within_deviations(expected.astype(np.float64), params)).tolist()


@pytest.mark.parametrize(
    "params",
    [SamplingParams(0.7, 5), SamplingParams(top_p=0.8), SamplingParams(min_p=0.1), SamplingParams(2.0, 7, 0.6, 0.2)],
)  # fmt: skip
def test_a_drafts_rows_are_filtered_like_the_targets(params: SamplingParams) -> None:
    """Each row alone, ties too; a row without numbers excludes nothing, as a damaged draft is no error."""
    rows = -np.sort(-np.round(np.random.default_rng(0).normal(size=(6, 40)), 1))
    for row, expected in zip(filtered(rows, params), rows, strict=True):
        assert row.tobytes() == filtered(expected, params).tobytes()
    assert filtered(rows[:0], params).shape == (0, 40)
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(filtered(np.full((2, 40), np.nan), params)).any()


@pytest.mark.parametrize("spread", [0.0, 0.3, 4.0])
def test_a_large_vocabulary_is_sampled_like_a_small_one(spread: float) -> None:
    """Tokens left out of sorting and noise could not have been drawn, also with flat distributions and ties."""
    logits = np.round(np.random.default_rng(0).normal(size=5000) * spread, 1)
    for position in range(40):
        for params in (SamplingParams(seed=position), SamplingParams(seed=position, top_p=0.0503 + 0.024 * position)):
            order = np.argsort(-logits, kind="stable")
            mass = np.cumsum(softmax(logits)[order])
            inside = order[: max(1, np.searchsorted(mass, params.top_p) + 1)]
            if params.top_p < 1:
                assert np.flatnonzero(np.isfinite(filtered(logits, params))).tolist() == sorted(inside)
            kept = filtered(logits, params)
            wanted = int((kept + gumbel_noise(params.seed, position, 5000)).argmax())
            assert draw(logits, params, position) == wanted


def test_a_draw_from_a_large_vocabulary_sorts_little_and_makes_little_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep draws for every accepted token of every session while the others wait for their answers."""
    sizes: list[int] = []

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(numbers: np.ndarray, **kwargs: Any) -> Any:
            sizes.append(len(numbers))
            return work(numbers, **kwargs)

        return run

    monkeypatch.setattr("bough.model.sampling.sampler.gumbel", counted(gumbel))
    monkeypatch.setattr("bough.model.sampling.sampler.np.argsort", counted(np.argsort))
    logits = np.random.default_rng(0).normal(size=50_000) * 4
    draw(logits, SamplingParams(top_p=0.9), 3)
    assert sizes
    assert max(sizes) <= 2000


def test_greedy_sampling_takes_the_best_and_noise_depends_on_seed_and_position_only() -> None:
    assert draw(LOGITS, SamplingParams(temperature=0.0), 5) == 0
    assert np.array_equal(gumbel_noise(3, 7, 10), gumbel_noise(3, 7, 20)[:10])
    assert not np.array_equal(gumbel_noise(3, 7, 10), gumbel_noise(3, 8, 10))
    assert not np.array_equal(gumbel_noise(3, 7, 10), gumbel_noise(4, 7, 10))


def test_the_noise_of_a_position_never_changes() -> None:
    """The first values for one key: a change here changes every user's sampled output."""
    assert gumbel_noise(42, 1, 3) == pytest.approx([-0.455803, -0.357506, 1.384255], abs=1e-6)


def test_penalties_and_bias_follow_their_definitions() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={3: 4.0})
    result = adjusted(LOGITS, params, TokenCounts.of([0, 4, 1, 1], 2))
    assert result.tolist() == [1.0, 0.5 - 0.5 - 0.5, 0.5, 4.0, -2.0, -3.0]
    assert LOGITS[0] == 2.0, "the model's logits are not edited in place"


def recounted(logits: np.ndarray, params: SamplingParams, history: list[int], prompt_length: int) -> np.ndarray:
    """Penalties one token at a time, counted again."""
    logits = logits.copy()
    for token in set(history):
        value = logits[token]
        logits[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token, count in Counter(history[prompt_length:]).items():
        logits[token] -= params.presence_penalty + count * params.frequency_penalty
    return logits


@given(
    st.lists(st.integers(0, 5), max_size=12),
    st.lists(st.integers(0, 5), max_size=5),
    st.integers(0, 17),
    st.floats(0.1, 3.0),
    st.floats(-2.0, 2.0),
    st.floats(-2.0, 2.0),
)
def test_counts_along_a_path_equal_new_counts_bit_for_bit(
    held: list[int], path: list[int], prompt_length: int, repetition: float, presence: float, frequency: float
) -> None:
    params = SamplingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    counts = TokenCounts.of(held, prompt_length).after(path, max(0, prompt_length - len(held)))
    if params.has_penalties:
        expected = recounted(LOGITS, params, [*held, *path], prompt_length)
        assert adjusted(LOGITS, params, counts).tobytes() == expected.tobytes()


@pytest.mark.parametrize("num_top", [0, 1, 5, 40, 100])
def test_alternatives_equal_those_of_a_sorted_vocabulary(num_top: int) -> None:
    """Of equals the lower token comes first, and what has no chance comes last."""
    rng = np.random.default_rng(num_top)
    for _ in range(200):
        logits = rng.integers(-3, 4, 40).astype(np.float64)
        logits[rng.random(40) < 0.2] = -np.inf
        logits[7] = 0.0
        entry = position_logprobs(logits, 7, num_top)
        expected = np.argsort(-logits, kind="stable")[:num_top]
        assert [top.token_id for top in entry.top] == expected.tolist()
        normaliser = logits.max() + np.log(np.exp(logits - logits.max()).sum())
        assert [top.logprob for top in entry.top] == (logits[expected] - normaliser).tolist()
        assert entry.token.logprob == logits[7] - normaliser


def test_without_alternatives_nothing_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the sweep thread that would sort a vocabulary for every token."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("sorted")

    monkeypatch.setattr(np, "argsort", refuse)
    monkeypatch.setattr(np, "partition", refuse)
    assert position_logprobs(LOGITS, 2, 0).top == ()


@given(
    st.lists(st.floats(-1e4, 1e4) | st.just(-np.inf), min_size=2, max_size=20).filter(lambda row: max(row) > -np.inf),
    st.just(0.0) | st.floats(0.01, 5),
    st.sampled_from([{}, {"top_p": 0.9, "min_p": 0.01, "top_k": 5}, {"repetition_penalty": 1.5}]),
    st.integers(0, 99),
)
def test_every_drawn_token_has_a_probability(
    logits: list[float], temperature: float, changes: dict[str, Any], position: int
) -> None:
    """For any tails of -inf in the logits, before penalties and after them."""
    params = SamplingParams(temperature=temperature, **changes)
    row = adjusted(np.array(logits), params, TokenCounts.of([0, 1, 1], 1))
    token = draw(row, params, position)
    assert logits[token] > -np.inf
    probs = probabilities(row, params)
    assert probs.sum() == pytest.approx(1.0)
    assert probs[token] > 0
    top = position_logprobs(np.array(logits), token, num_top=3)
    assert np.isfinite(top.token.logprob)
    assert not any(np.isnan(other.logprob) for other in top.top)


def test_a_banned_token_is_never_drawn_at_any_temperature() -> None:
    params = SamplingParams(temperature=1e4, logit_bias={0: BANNED, 3: BANNED})
    drawn = {draw(adjusted(LOGITS, params, TokenCounts.of([], 0)), params, position) for position in range(400)}
    assert drawn == {1, 2, 4, 5}


def test_nan_logits_are_an_error_and_not_a_token() -> None:
    with pytest.raises(Unavailable, match="not numbers"):
        draw(np.array([np.nan, 1.0]), SamplingParams(), 3)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"temperature": -0.1}, "temperature: must .* got -0.1"),
        ({"temperature": float("nan")}, "temperature: must .* got nan"),
        ({"temperature": float("inf")}, "temperature: must .* got inf"),
        ({"top_p": 0.0}, "top_p: must .* got 0.0"),
        ({"top_p": 1.1}, "top_p: must .* got 1.1"),
        ({"top_p": float("nan")}, "top_p: must .* got nan"),
        ({"min_p": -1.0}, "min_p: must .* got -1.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: must .* got 0.0"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty: must .* got 1e-300"),
        ({"presence_penalty": 3.0}, "presence_penalty: must .* got 3.0"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty: must .* got nan"),
        ({"logit_bias": {6: 1.0}}, "logit_bias: must .* got 6"),
        ({"logit_bias": {1: float("nan")}}, r"logit_bias\[1\]: must .* got nan"),
        ({"logit_bias": {1: float("inf")}}, r"logit_bias\[1\]: must be .* or -inf to ban it, got inf"),
        (
            {"logit_bias": dict.fromkeys(range(6), BANNED)},
            "logit_bias: must leave at least one token, got all 6 banned",
        ),
        ({"logprobs": 65}, "logprobs: must .* got 65"),
        ({"stop_token_ids": frozenset({6})}, "stop_token_ids: must .* got 6"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(changes: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**changes).validate(vocab_size=6)


def test_stop_conditions_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"max_tokens: must .* got 0"):
        StopConditions(max_tokens=0).validate()
    with pytest.raises(InvalidRequest, match=r"stop\[1\]: must .* got ''"):
        StopConditions(stop=("a", "")).validate()
