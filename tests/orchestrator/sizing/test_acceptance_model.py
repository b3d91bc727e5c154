"""Calibration of a draft's probabilities: what it recovers, what it must not learn from, how fast it disbelieves."""

from __future__ import annotations

import numpy as np
import pytest

from bough.trees.tree import Tree
from orchestrator.sizing.pairs import AcceptanceModel, SessionBias, with_values


def random_tree(rng: np.random.Generator, num_nodes: int = 16) -> Tree:
    """Each node has distinct tokens below it and a conditional probability of its own."""
    parents = [-1, *(int(rng.integers(0, node)) for node in range(1, num_nodes))]
    log_probs = [0.0, *np.log(rng.uniform(0.05, 0.95, num_nodes - 1)).tolist()]
    return Tree.of(list(range(num_nodes)), parents, log_probs)


def chain(*probs: float) -> Tree:
    """One node below another."""
    return Tree.of(range(len(probs) + 1), range(-1, len(probs)), [0.0, *np.log(probs).tolist()])


def verdict(tree: Tree, rng: np.random.Generator, slope: float, bias: float) -> list[int]:
    """The path of a target that takes the first child, in their order, whose calibrated chance comes up."""
    node, path = 0, []
    while True:
        for child in np.flatnonzero(tree.parents == node).tolist():
            prob = np.exp(tree.log_probs[child])
            if rng.random() < 1 / (1 + np.exp(-(slope * np.log(prob / (1 - prob)) + bias))):
                path.append(child)
                node = child
                break
        else:
            return path


def everything(tree: Tree) -> np.ndarray:
    return np.ones(len(tree), np.bool_)


def test_a_draft_is_taken_at_its_word_before_anything_is_known() -> None:
    tree = chain(0.9, 0.5, 0.2)
    assert AcceptanceModel().conditional(tree) == pytest.approx([1.0, 0.9, 0.5, 0.2], rel=1e-5)
    assert AcceptanceModel().values(tree) == pytest.approx([1.0, 0.9, 0.45, 0.09], rel=1e-5)


def test_what_a_draft_overstates_is_learnt() -> None:
    """400 rounds of chains: P(accepted) = sigmoid(0.5 logit(q) - 1); found within 0.06 at every q that occurs."""
    model, rng = AcceptanceModel(), np.random.default_rng(1)
    for _ in range(400):
        tree = chain(*rng.uniform(0.1, 0.95, 6))
        model.observe(tree, verdict(tree, rng, 0.5, -1.0), everything(tree), SessionBias())
    probs = np.array([0.1, 0.3, 0.6, 0.9])
    expected = 1 / (1 + np.exp(-(0.5 * np.log(probs / (1 - probs)) - 1.0)))
    for prob, true in zip(probs, expected, strict=True):
        assert model.conditional(chain(prob))[1] == pytest.approx(true, abs=0.06)


def test_expected_tokens_agree_with_what_comes_to_pass() -> None:
    """Over 600 rounds after 300 of learning, within 5 %."""
    model, rng = AcceptanceModel(), np.random.default_rng(2)
    expected = realised = 0.0
    for round_ in range(900):
        tree = chain(*rng.uniform(0.3, 0.99, 8))
        path = verdict(tree, rng, 0.8, 0.3)
        if round_ >= 300:
            expected += float(model.values(tree).sum())
            realised += 1 + len(path)
        model.observe(tree, path, everything(tree), SessionBias())
    assert expected == pytest.approx(realised, rel=0.05)


def test_a_draft_that_is_sure_and_wrong_is_disbelieved_within_a_few_rounds() -> None:
    model, bias = AcceptanceModel(), SessionBias()
    tree = chain(0.99, 0.99)
    for _ in range(4):
        model.observe(tree, [], everything(tree), bias)
    assert model.values(tree, bias)[1] < 0.35


def test_what_was_not_verified_is_missing_and_not_wrong() -> None:
    """A right guess that was left out: the guesses below it teach nothing, however often that happens."""
    model, bias, tree = AcceptanceModel(), SessionBias(), chain(0.6, 0.6)
    before = model.conditional(tree)[2]
    is_verified = np.array([True, False, False])
    for _ in range(20):
        model.observe(tree, [1], is_verified, bias)
    bias.value = 0.0
    assert model.conditional(tree)[1] > 0.6
    assert model.conditional(tree)[2] >= before, "it was taken for rejected"


def test_one_session_may_be_easier_than_the_others() -> None:
    model, easy, hard = AcceptanceModel(), SessionBias(), SessionBias()
    tree = chain(0.5)
    for _ in range(40):
        model.observe(tree, [1], everything(tree), easy)
        model.observe(tree, [], everything(tree), hard)
    assert model.values(tree, easy)[1] > 0.6 > 0.4 > model.values(tree, hard)[1]


def test_no_node_is_worth_more_than_its_parent() -> None:
    model, rng = AcceptanceModel(), np.random.default_rng(3)
    sure = chain(0.95, 0.95, 0.95)
    for _ in range(50):
        model.observe(sure, [1, 2, 3], everything(sure), SessionBias())
    for _ in range(20):
        tree = random_tree(rng)
        values = model.values(tree)
        assert (values[1:] <= values[tree.parents[1:]] + 1e-12).all()
        assert np.exp(with_values(tree, values).scores()) == pytest.approx(values, rel=1e-3, abs=1e-9)
        with_values(tree, values).validate(64, 64)
