"""Text models of simulated pairs: text by seed and position alone, guesses right as often as the vector says."""

from __future__ import annotations

import numpy as np
import pytest

from bough.simulation.acceptance_model import LLAMA_3_CNN, PUBLISHED, AcceptanceModel, read_acceptance_model
from bough.simulation.hashing import key_of, mixed
from bough.simulation.text_model import FIRST_WORD, NUM_WORDS, TextModel, level_vectors
from bough.simulation.tokenizer import END_TOKEN, simulated_tokenizer
from bough.tokenization.tokenizer import Tokenizer
from tests.fakes.simulated import expected_tokens_of, true_ranks

NUM = 200_000


def model_of(**fields: object) -> TextModel:
    return TextModel(read_acceptance_model(dict(fields)), FIRST_WORD, NUM_WORDS)


def published(spread: float = 0.0, overconfidence: float = 1.0) -> TextModel:
    return model_of(kind="by_rank", vector="llama-3-70b-8b-cnn-dailymail", spread=spread, overconfidence=overconfidence)


def assert_rates(ranks: np.ndarray, wanted: np.ndarray) -> None:
    """Every rank's share within five and a half standard errors, so that 32 ranks fail once in 800,000 seeds."""
    rates = np.bincount(ranks, minlength=len(wanted) + 1)[: len(wanted)] / len(ranks)
    errors = np.sqrt(wanted * (1 - wanted) / len(ranks))
    assert (np.abs(rates - wanted) <= 5.5 * errors + 1e-12).all()


@pytest.mark.parametrize("spread", [0.0, 0.5, 0.95])
def test_the_true_token_has_each_rank_as_often_as_the_vector_says(spread: float) -> None:
    assert_rates(true_ranks(published(spread), 7, np.arange(NUM)), np.array(LLAMA_3_CNN))


@pytest.mark.parametrize("spread", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("vector", [*PUBLISHED.values(), (0.3, 0.2, 0.1), (0.9,)])
def test_positions_differ_and_their_mean_is_the_vector(vector: tuple[float, ...], spread: float) -> None:
    levels = level_vectors(np.array(vector), spread)
    np.testing.assert_allclose(levels.mean(axis=0), vector, atol=1e-12)
    assert levels[:, 0].std() > 0.5 * spread * np.sqrt((vector[0] - vector[1] if vector[1:] else 0.9) * 0.1)
    assert (levels >= 0).all()
    assert (levels.sum(axis=1) <= 1 + 1e-9).all()
    if list(vector) == sorted(vector, reverse=True):
        assert (np.diff(levels, axis=1) <= 1e-12).all(), "ranks stay in order"


def test_true_tokens_depend_on_seed_and_position_only() -> None:
    model = published()
    whole = model.truth(3, np.arange(1000))
    parts = np.concatenate([model.truth(3, np.arange(begin, begin + 10)) for begin in range(0, 1000, 10)])
    np.testing.assert_array_equal(whole, parts)
    np.testing.assert_array_equal(whole, model_of(kind="hostile").truth(3, np.arange(1000)))
    assert (whole != model.truth(4, np.arange(1000))).mean() > 0.9
    assert whole.min() >= FIRST_WORD
    assert whole.max() < FIRST_WORD + NUM_WORDS
    assert whole[:5].tolist() == [663, 570, 443, 572, 590]  # the same in every process and version


def test_candidates_do_not_depend_on_the_batch() -> None:
    model = published(0.5)
    is_true = np.arange(60) % 3 > 0
    positions, salts = np.arange(60) + 100, np.arange(60) * 7
    whole = model.candidates(5, is_true, positions, salts)
    for index in (0, 1, 17, 59):
        one = slice(index, index + 1)
        alone = model.candidates(5, is_true[one], positions[one], salts[one])
        np.testing.assert_array_equal(alone.tokens, whole.tokens[one])
        np.testing.assert_array_equal(alone.log_probs, whole.log_probs[one])
    again = model.candidates(5, is_true, positions, salts + 1)
    changed = (again.tokens != whole.tokens).any(axis=1)
    np.testing.assert_array_equal(changed, ~is_true)  # on the true path the salt does not matter


def test_candidates_are_distinct_and_contain_the_true_token_at_its_rank() -> None:
    model = published(0.5)
    positions = np.arange(5000)
    truth = model.truth(5, positions)
    found = model.candidates(5, np.ones(5000, bool), positions)
    ranks = true_ranks(model, 5, positions)
    assert all(len(set(row)) == model.num_ranks for row in found.tokens.tolist())
    for row, rank, token in zip(found.tokens.tolist(), ranks.tolist(), truth.tolist(), strict=True):
        assert (row.index(token) if token in row else model.num_ranks) == rank
    wrong = model.candidates(5, np.zeros(5000, bool), positions, positions)
    assert not (wrong.tokens == truth[:, None]).any()
    assert wrong.tokens.min() >= FIRST_WORD


def test_stated_probabilities_are_true_without_distortion() -> None:
    model = published(0.6)
    positions = np.arange(NUM)
    stated = np.exp(model.candidates(9, np.ones(NUM, bool), positions).log_probs[:, 0].astype(float))
    right = true_ranks(model, 9, positions) == 0
    for low, high in ((0.0, 0.6), (0.6, 0.8), (0.8, 0.95), (0.95, 1.01)):
        these = (stated >= low) & (stated < high)
        wanted = stated[these].mean()
        error = np.sqrt(wanted * (1 - wanted) / these.sum())
        assert these.sum() > 1000
        assert abs(right[these].mean() - wanted) < 5 * error  # one in 1.7 million


def test_overconfidence_raises_stated_probabilities_and_changes_no_token() -> None:
    plain, bold, shy = published(0.5), published(0.5, 2.0), published(0.5, 0.5)
    positions, is_true = np.arange(2000), np.ones(2000, bool)
    true, more, less = (model.candidates(1, is_true, positions) for model in (plain, bold, shy))
    np.testing.assert_array_equal(true.tokens, more.tokens)
    assert more.log_probs[:, 0].mean() > true.log_probs[:, 0].mean() > less.log_probs[:, 0].mean()
    for each in (true, more, less):
        assert (np.exp(each.log_probs.astype(float)).sum(axis=1) <= 1 + 1e-5).all()
        assert (np.diff(each.log_probs, axis=1) <= 1e-5).all()


def test_a_hostile_draft_is_certain_and_always_wrong() -> None:
    model = model_of(kind="hostile")
    found = model.candidates(1, np.ones(3000, bool), np.arange(3000))
    assert not (found.tokens == model.truth(1, np.arange(3000))[:, None]).any()
    assert np.exp(found.log_probs[:, 0]).min() > 0.99
    assert expected_tokens_of(model.acceptance, 64, 8) == 1.0


def test_acceptance_by_depth_depends_on_a_nodes_depth() -> None:
    model = model_of(kind="by_depth", vectors=[[0.9, 0.05], [0.4, 0.2]])
    positions = np.arange(NUM)
    assert_rates(true_ranks(model, 2, positions), np.array([0.9, 0.05]))
    assert_rates(true_ranks(model, 2, positions, 1), np.array([0.4, 0.2]))
    assert_rates(true_ranks(model, 2, positions, 9), np.array([0.4, 0.2]))
    assert expected_tokens_of(model.acceptance, 3, 3) == pytest.approx(1 + 0.9 + 0.9 * 0.4)


def test_drifting_acceptance_moves_from_one_vector_to_the_other() -> None:
    model = model_of(kind="drifting", first=[0.8, 0.1], last=[0.2], over_positions=1000, spread=0.3)
    at = np.full(NUM, 500)
    ranks = np.concatenate([true_ranks(model, seed, np.arange(450, 551)) for seed in range(1000)])
    assert_rates(ranks, np.array([0.5, 0.05]))
    late = np.concatenate([true_ranks(model, seed, at[:100] + 600 + np.arange(100)) for seed in range(1000)])
    assert_rates(late, np.array([0.2, 0.0]))
    assert model.acceptance.acceptance(500)[0].tolist() == pytest.approx([0.5, 0.05])


def test_expected_tokens_equal_the_papers() -> None:
    measured = read_acceptance_model({"kind": "by_rank", "vector": [c / 667 for c in (423, 72, 38)]})
    assert expected_tokens_of(measured, 1, 8) == 1.0
    whole = AcceptanceModel("by_rank", (LLAMA_3_CNN,))
    assert expected_tokens_of(whole, 64, 64) == pytest.approx(5.9166, abs=1e-4)


def test_text_only_ends_if_an_end_rate_is_set() -> None:
    assert not (published().truth(1, np.arange(NUM)) == END_TOKEN).any()
    model = TextModel(published().acceptance, FIRST_WORD, NUM_WORDS, END_TOKEN, end_rate=0.01)
    rate = (model.truth(1, np.arange(NUM)) == END_TOKEN).mean()
    assert abs(rate - 0.01) < 5 * np.sqrt(0.01 * 0.99 / NUM)
    found = model.candidates(1, np.ones(1000, bool), np.arange(1000))
    assert (found.tokens == END_TOKEN).any(), "a draft guesses an end too"


def test_a_million_tokens_are_computed_without_a_loop() -> None:
    assert len(published().truth(1, np.arange(1_000_000))) == 1_000_000


def test_keys_are_the_same_on_every_machine() -> None:
    assert mixed(1, -1, np.array([2, 3])).tolist() == mixed(1, 2**64 - 1, np.array([2, 3])).tolist()
    assert key_of("session") == key_of("session") != key_of("sessions")
    assert int(mixed(1, 2)) != int(mixed(2, 1))
    for numbers in ((), (0,), (7, -3, 2**64 - 1), (2**63, 5)):
        arrays = (np.array([number % 2**64], np.uint64) for number in numbers)
        assert np.asarray(mixed(*numbers)).ravel().tolist() == np.asarray(mixed(*arrays)).ravel().tolist()


def test_words_round_trip_through_text() -> None:
    tokenizer = Tokenizer(simulated_tokenizer())
    tokens = published().truth(1, np.arange(500)).tolist()
    text = tokenizer.decode(tokens)
    assert tokenizer.encode(text) == tokens
    assert text.split()[0].isalpha()
    assert tokenizer.decode(tokenizer.encode("Grüße, 你好!\n\t{}")) == "Grüße, 你好!\n\t{}"
    assert END_TOKEN in tokenizer.encode_turn([("user", "And then?")])
    opened = tokenizer.encode_chat([("user", "Why?")])
    assert tokenizer.encode_more(text, before=tokenizer.decode(opened)) == tokens
    assert simulated_tokenizer() is simulated_tokenizer()
    assert simulated_tokenizer().vocabulary[END_TOKEN] == "<|end|>"
