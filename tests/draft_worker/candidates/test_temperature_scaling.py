"""How sure a draft may be of its guesses: learnt from what was right, and never more than a matter of speed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from bough.config.processes import DraftConfig, parse
from bough.errors import ConfigError
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree_plan import BestFirst, Scheme, StaticShape, TreePlan
from draft_worker.candidates.candidates import (
    LEAST_POWER,
    MOST_POWER,
    Guessing,
    TemperatureScaling,
    TemperatureScalings,
    scaled,
)
from draft_worker.growth.grower import Candidates
from tests.fakes.draft import FakeModel, fake_log_probs, grow_call, grow_now, new_engine

VOCAB = 12
GREEDY, DRAWN = SamplingParams(0.0), SamplingParams(0.8, seed=3)


def guessing(params: SamplingParams, is_sample: bool = False, is_perturbed: bool = False) -> Guessing:
    return Guessing(params, 0, is_sample, is_perturbed)


def said(num_nodes: int, num_kept: int, seed: int) -> tuple[Candidates, NDArray[np.float64]]:
    """What a draft of `VOCAB` tokens says of some nodes, of which the likeliest are candidates, and all of it."""
    logits = np.random.default_rng(seed).normal(size=(num_nodes, VOCAB)) * 2
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    tokens = np.argsort(-log_probs, axis=1)[:, :num_kept]
    kept = np.take_along_axis(log_probs, tokens, 1)
    return Candidates(tokens.astype(np.int32), kept.astype(np.float32)), log_probs


def drawn(log_probs: NDArray[np.float64], power: float, seed: int) -> NDArray[np.int32]:
    """A token of each node, by the probabilities to a power."""
    noise = np.random.default_rng(seed).gumbel(size=log_probs.shape)
    tokens: NDArray[np.int32] = (power * log_probs + noise).argmax(1).astype(np.int32)
    return tokens


@pytest.mark.parametrize(
    ("powers", "num_rounds", "num_kept", "tolerance"),
    [
        *(((power,), 1000, num_kept, 0.1) for power in (0.6, 1.0, 1.5, 2.5) for num_kept in (VOCAB, 8)),
        pytest.param((2.0,), 25, VOCAB, 0.3, id="a hundred tokens are better than none"),
        pytest.param((2.0, 0.8), 4000, VOCAB, 0.1, id="another text follows"),
    ],
)
def test_the_power_that_generated_the_text_is_found(
    powers: tuple[float, ...], num_rounds: int, num_kept: int, tolerance: float
) -> None:
    """A few nodes at a time, as rounds bring them. What is no candidate counts as one of its own, which is close."""
    scaling = TemperatureScaling()
    for number, power in enumerate(powers):
        for round_ in range(num_rounds):
            candidates, log_probs = said(4, num_kept, 10_000 * number + round_)
            scaling.observe(candidates, drawn(log_probs, power, 20_000 + round_))
        assert scaling.power == pytest.approx(power, rel=tolerance)
    assert scaling.num_tokens == 4 * num_rounds * len(powers)


@pytest.mark.parametrize(("token", "bound"), [(5, LEAST_POWER), (0, MOST_POWER)])
def test_a_draft_that_is_always_wrong_or_right_reaches_the_limits(token: int, bound: float) -> None:
    scaling = TemperatureScaling()
    candidates = Candidates(np.int32([[0, 1, 2]]), np.log(np.float32([[0.5, 0.3, 0.1]])))
    for _ in range(2000):
        scaling.observe(candidates, np.int32([token]))
    assert scaling.power == bound


@given(
    arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 5)), elements=st.floats(-80, 0, width=32)),
    st.floats(LEAST_POWER, MOST_POWER),
    st.data(),
)
def test_scaled_probabilities_are_valid_and_keep_their_order(
    scores: NDArray[np.float32], power: float, data: st.DataObject
) -> None:
    """One-hot rows, rows without a chance, and candidates that leave nothing for other tokens."""
    scores = -np.sort(-scores, axis=1)
    log_probs = (scores - np.log(np.exp(scores.astype(np.float64)).sum(1, keepdims=True))).astype(np.float32)
    log_probs = np.minimum(log_probs, 0)
    for row in range(len(log_probs)):
        log_probs[row, data.draw(st.integers(0, log_probs.shape[1])) :] = -np.inf
    result = scaled(log_probs, power)
    assert not np.isnan(result).any()
    assert (result <= 0).all()
    assert np.array_equal(np.isfinite(result), np.isfinite(log_probs))
    assert (np.exp(result.astype(np.float64)).sum(1) < 1 + 1e-5).all()
    assert (np.diff(np.where(np.isfinite(result), result, -1e9), axis=1) <= 0).all()
    scaling = TemperatureScaling(power)
    right = np.zeros(len(log_probs), np.int32)
    scaling.observe(
        Candidates(np.tile(np.arange(log_probs.shape[1], dtype=np.int32), (len(right), 1)), log_probs), right
    )
    assert LEAST_POWER <= scaling.power <= MOST_POWER


def test_power_one_leaves_probabilities_unchanged() -> None:
    candidates, _ = said(3, 6, seed=1)
    assert np.array_equal(scaled(candidates.log_probs, 1.0), candidates.log_probs)
    assert scaled(candidates.log_probs, 1.0 + 1e-9) == pytest.approx(candidates.log_probs, abs=1e-6)


def test_each_kind_of_guess_has_its_own_power_and_samples_have_none() -> None:
    scalings = TemperatureScalings()
    kinds = [guessing(GREEDY), guessing(DRAWN), guessing(DRAWN, is_perturbed=True), guessing(SamplingParams(1.2))]
    assert len({id(scalings.of(kind)) for kind in kinds}) == 4
    assert scalings.of(guessing(SamplingParams(0.8, seed=9, top_k=3))) is scalings.of(guessing(DRAWN))
    candidates, log_probs = said(100, VOCAB, seed=1)
    for kind in (guessing(GREEDY), guessing(DRAWN, is_sample=True)):
        scalings.of(kind).observe(candidates, drawn(log_probs, 2.0, seed=2))
    assert scalings.of(guessing(DRAWN, is_sample=True)).power == scalings.of(guessing(DRAWN)).power == 1.0
    (note,) = scalings.notes()
    assert note.startswith("guesses at temperature 0 are judged by the draft's probabilities to the power of ")
    assert note.endswith(", learnt from 100 tokens")


def test_a_configured_power_is_not_learnt() -> None:
    scalings = TemperatureScalings(1.5)
    candidates, log_probs = said(100, VOCAB, seed=1)
    scalings.of(guessing(GREEDY)).observe(candidates, drawn(log_probs, 3.0, seed=2))
    assert scalings.of(guessing(GREEDY)).power == 1.5
    assert scalings.of(guessing(DRAWN, is_sample=True)).power == 1.0
    assert scalings.notes() == []


@pytest.mark.parametrize("value", ["-1", "4.5", "much", "nan"])
def test_an_invalid_power_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigError, match=r"--inverse-temperature: .*0 to 4"):
        parse(DraftConfig, "draft_worker", ["--model", "m", "--inverse-temperature", value], {})


def likeliest(tokens: list[int], num_tokens: int) -> list[int]:
    """What the fake draft itself would say."""
    for _ in range(num_tokens):
        tokens = [*tokens, int(np.argmax(fake_log_probs(tokens)))]
    return tokens


def test_an_underconfident_draft_grows_deeper_trees() -> None:
    plan = TreePlan(BestFirst(8, 2, 6))
    engine, as_it_is = new_engine(FakeModel(), power=0.0), new_engine(FakeModel())
    tokens, held = [3, 1, 4], 0
    for _ in range(12):
        tree = grow_now(engine, grow_call(tokens, held, plan=plan)).tree
        own = grow_now(as_it_is, grow_call(tokens, held, plan=plan)).tree
        held = len(tokens) - 1
        tokens = likeliest(tokens, 3)
    assert engine.scalings.of(guessing(GREEDY)).power > 1.25
    assert tree.depths().mean() > own.depths().mean()
    assert tree.scores()[1:].max() > own.scores()[1:].max()


@pytest.mark.slow
def test_trees_do_not_depend_on_what_was_explored_ahead() -> None:
    """What the draft found out without being asked teaches it nothing, or trees would depend on it."""
    cold, warm = new_engine(FakeModel(), power=0.0), new_engine(FakeModel(), ahead_steps=20, power=0.0)
    tokens, held = [3, 1, 4], 0
    rng = np.random.default_rng(1)
    for _ in range(10):
        trees = [grow_now(engine, grow_call(tokens, held)).tree for engine in (cold, warm)]
        assert trees[0] == trees[1]
        while warm.can_go_ahead:
            warm.step()
        held = len(tokens) - 1
        tokens = [*likeliest(tokens, int(rng.integers(0, 4))), int(rng.integers(6))]
    powers = [engine.scalings.of(guessing(GREEDY)).power for engine in (cold, warm)]
    assert powers[0] == powers[1] != 1.0


def test_another_text_or_a_repeated_call_is_not_learnt_from() -> None:
    engine = new_engine(FakeModel(), power=0.0)
    scaling = engine.scalings.of(guessing(GREEDY))
    grow_now(engine, grow_call([3, 1, 4]))
    grow_now(engine, grow_call([3, 1, 4], 2))
    grow_now(engine, grow_call([3, 1, 2, 5], 2))
    assert (scaling.power, scaling.num_tokens) == (1.0, 0)
    grow_now(engine, grow_call([3, 1, 2, 5, 0], 3))
    assert scaling.num_tokens == 1


def test_samples_follow_the_drafts_distribution() -> None:
    """They are verified by it: no power may touch them."""
    plan = TreePlan(StaticShape((0, 0, 1, 1, 2)), Scheme.WITHOUT_REPLACEMENT)
    trees = [
        grow_now(new_engine(FakeModel(), power=power), grow_call([3, 1, 4], sampling=DRAWN, plan=plan)).tree
        for power in (1.0, 3.0, 0.0)
    ]
    assert trees[0] == trees[1] == trees[2]
    assert trees[0].draft_probs is not None
