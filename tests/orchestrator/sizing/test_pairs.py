"""What is learnt of a target and a draft: calibrated probabilities, a step's worth, trust, and when to try again."""

from __future__ import annotations

import numpy as np
import pytest

from bough.trees.tree import Tree
from orchestrator.sizing.pairs import (
    FIRST_BOUND,
    FIRST_PROBE,
    LAST_PROBE,
    AcceptanceModel,
    Margin,
    Probing,
    RoundStats,
    SessionBias,
    Trust,
    with_values,
)  # fmt: skip


def chain(*probs: float) -> Tree:
    return Tree.of(range(len(probs) + 1), range(-1, len(probs)), [0.0, *np.log(probs).tolist()])


def taught(tree: Tree, values: list[float], rounds: int = 200) -> Margin:
    margin = Margin()
    for _ in range(rounds):
        margin.observe(AcceptanceModel().view(tree), np.array(values))
    return margin


def grown_levels(min_gain: float, bounds: list[float]) -> int:
    """Steps that a draft worker makes with this least gain: while what can be had is no less."""
    return next((level for level, bound in enumerate(bounds) if bound < min_gain), len(bounds))


def test_steps_of_an_honest_draft_are_priced_by_what_they_must_gain() -> None:
    """Its best guess of each level is right as often as it says, 0.8; the bound of a level is what leads to it."""
    tree, values = chain(0.8, 0.8, 0.8, 0.8), [1.0, 0.8, 0.64, 0.512, 0.4096]
    margin, bounds = taught(tree, values), [0.8**level for level in range(5)]
    for tokens, levels in ((0.45, 3), (0.6, 2), (0.7, 1)):
        assert grown_levels(margin.min_gain(tokens), bounds) == levels, tokens


def test_growth_of_an_overconfident_draft_stops_where_steps_gain_too_little() -> None:
    """It says 0.9 at every level; guesses are right in 0.8, 0.64 and 0.5 of cases."""
    margin, bounds = taught(chain(0.9, 0.9, 0.9), [1.0, 0.8, 0.64, 0.5]), [1.0, 0.9, 0.81]
    assert [grown_levels(margin.min_gain(tokens), bounds) for tokens in (0.85, 0.7, 0.55, 0.4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("tokens", "most"), [(0.95, 0), (0.5, 1), (0.3, 2), (0.05, 3)])
def test_growth_stops_before_a_sudden_drop_of_acceptance_and_still_begins(tokens: float, most: int) -> None:
    """Right in 0.9, 0.45 and 0.1 of cases: one bound for all levels cannot say it exactly."""
    margin, bounds = taught(chain(0.9, 0.9, 0.9), [1.0, 0.9, 0.45, 0.1]), [1.0, 0.9, 0.81]
    assert min(1, most) <= grown_levels(margin.min_gain(tokens), bounds) <= most


@pytest.mark.parametrize("tokens", [0.0, 0.01, 0.3, 0.69, 0.71, 2.0, 50.0])
def test_a_first_step_is_made_while_it_pays_and_prices_are_finite(tokens: float) -> None:
    """A draft makes its first step for the gain of a token, whatever it really gains."""
    bound = Margin().min_gain(tokens)
    assert np.isfinite(bound)
    assert bound >= 0
    assert (bound <= FIRST_BOUND) == (tokens <= 0.7), "by the prior it brings 0.7"


def test_prices_rise_with_the_required_gain() -> None:
    margin = taught(chain(0.9, 0.8, 0.6), [1.0, 0.7, 0.4, 0.2])
    bounds = [margin.min_gain(tokens) for tokens in np.linspace(0.01, 3.0, 60)]
    levels = [grown_levels(bound, [1.0, 0.9, 0.72]) for bound in bounds]
    assert levels == sorted(levels, reverse=True)


def test_useless_trees_are_distrusted_at_once_and_trust_returns() -> None:
    trust = Trust()
    assert trust.factor == 1.0
    for _ in range(4):
        trust.observe(4.0, 0)
    assert trust.factor < 0.3
    for _ in range(60):
        trust.observe(4.0, 4)
    assert trust.factor > 0.95
    for _ in range(50):
        trust.observe(1.0, 8)
    assert trust.factor == 1.0


def gaps(probing: Probing, num: int) -> list[int]:
    """Rounds from one probe to the next."""
    found = []
    for _ in range(num):
        count = 1
        while not probing.is_due():
            count += 1
        found.append(count)
    return found


def test_probes_come_soon_and_then_less_often() -> None:
    probing = Probing()
    probing.begin()
    assert gaps(probing, 8) == [8, 16, 32, 64, 128, 256, 256, 256]
    assert (FIRST_PROBE, LAST_PROBE) == (8, 256)


def test_a_probe_that_paid_is_soon_followed_by_another() -> None:
    """Luck costs one more probe, and nothing else: the next comes as late as it would have."""
    probing = Probing()
    gaps(probing, 7)
    probing.paid()
    assert gaps(probing, 2) == [FIRST_PROBE, LAST_PROBE]
    probing.begin()
    assert gaps(probing, 2) == [8, 16]


def test_trees_grown_ahead_count_as_trees_without_a_step() -> None:
    """Left out, every third of them made trees seem half as dear again as they are."""
    stats = RoundStats()
    assert stats.num_steps is None, "nothing is known of trees"
    for number in range(60):
        stats.note_steps(0 if number % 3 == 0 else 6)
    assert stats.num_steps == pytest.approx(4.0, abs=1.0)
    assert RoundStats.after(stats).num_steps == stats.num_steps


def random_tree(rng: np.random.Generator, num_nodes: int = 16) -> Tree:
    """Each node has distinct tokens below it and a conditional probability of its own."""
    parents = [-1, *(int(rng.integers(0, node)) for node in range(1, num_nodes))]
    log_probs = [0.0, *np.log(rng.uniform(0.05, 0.95, num_nodes - 1)).tolist()]
    return Tree.of(list(range(num_nodes)), parents, log_probs)


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


def test_a_drafts_probabilities_are_trusted_before_anything_is_learnt() -> None:
    tree = chain(0.9, 0.5, 0.2)
    assert AcceptanceModel().conditional(tree) == pytest.approx([1.0, 0.9, 0.5, 0.2], rel=1e-5)
    assert AcceptanceModel().values(tree) == pytest.approx([1.0, 0.9, 0.45, 0.09], rel=1e-5)


def test_overconfidence_of_a_draft_is_learnt() -> None:
    """400 rounds of chains: P(accepted) = sigmoid(0.5 logit(q) - 1); found within 0.06 at every q that occurs."""
    model, rng = AcceptanceModel(), np.random.default_rng(1)
    for _ in range(400):
        tree = chain(*rng.uniform(0.1, 0.95, 6))
        model.observe(tree, verdict(tree, rng, 0.5, -1.0), everything(tree), SessionBias())
    probs = np.array([0.1, 0.3, 0.6, 0.9])
    expected = 1 / (1 + np.exp(-(0.5 * np.log(probs / (1 - probs)) - 1.0)))
    for prob, true in zip(probs, expected, strict=True):
        assert model.conditional(chain(prob))[1] == pytest.approx(true, abs=0.06)


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
