"""Growers without a model: best-first against brute force, shapes, chains, samples, limits and ends."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import InvalidRequest
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst, Growth, Scheme, StaticShape, TreePlan
from draft_worker.growth.grower import BestFirstGrower, Candidates, Grower
from draft_worker.growth.static_shape import grower_for
from tests.fakes.draft import VOCAB, fake_log_probs, grow_call

ROOT = 0
SAMPLED = (Scheme.WITHOUT_REPLACEMENT, Scheme.TRAVERSAL)
shapes = st.lists(st.integers(0, 3), max_size=20).map(
    lambda steps: StaticShape(
        tuple(np.minimum(np.cumsum([0, *steps[1:]])[: len(steps)], np.arange(len(steps))).tolist())
    )
)


def path_to(grower: Grower, node: int) -> list[int]:
    """The tokens from the root to a node."""
    path = []
    while node >= 0:
        path.append(int(grower.tree.tokens[node]))
        node = int(grower.tree.parents[node])
    return path[::-1]


def grown(grower: Grower, before_step: Callable[[np.ndarray], None] = lambda _: None) -> Tree:
    """What a grower makes of `fake_log_probs`; `before_step` gets the nodes of every step."""
    while len(frontier := grower.frontier()):
        before_step(frontier)
        rows = np.stack([fake_log_probs(path_to(grower, node)) for node in frontier.tolist()])
        order = np.argsort(-rows, axis=1)
        grower.take(frontier, Candidates(order.astype(np.int32), np.take_along_axis(rows, order, 1)))
    return grower.finished()


def best_first(limits: BestFirst, stop_tokens: Sequence[int] = ()) -> BestFirstGrower:
    return BestFirstGrower(ROOT, limits, VOCAB, np.array(stop_tokens, np.int32))


@given(st.integers(1, 40), st.integers(1, 4))
def test_with_enough_width_the_best_paths_are_found(budget: int, depth: int) -> None:
    """Brute force over every path up to `depth`; a wide frontier leaves nothing to luck."""
    tree = grown(best_first(BestFirst(budget, width=10_000, depth=depth)))
    scores = [0.0]
    for length in range(1, depth + 1):
        for path in itertools.product(range(VOCAB), repeat=length):
            scores.append(sum(float(fake_log_probs((ROOT, *path[:i]))[path[i]]) for i in range(length)))
    best = sorted(scores, reverse=True)[:budget]
    tree.validate(VOCAB, budget)
    assert sorted(tree.scores().tolist(), reverse=True) == pytest.approx(best, abs=1e-4)


@given(st.integers(2, 40), st.integers(1, 5), st.integers(1, 5), st.floats(0.01, 1.5))
def test_no_step_costs_more_than_it_gains(budget: int, width: int, depth: int, min_gain: float) -> None:
    """A step is worth all that it could add."""
    grower = best_first(BestFirst(budget, width, depth, min_gain=min_gain))

    def check(frontier: np.ndarray) -> None:
        assert np.exp(grower.tree.scores[frontier]).sum() >= min_gain

    assert len(grown(grower, check)) > 1 or min_gain > 1


def test_a_step_is_worth_what_it_can_add_to_a_full_tree() -> None:
    """Children take the place of nodes that are there already."""
    limits = BestFirst(budget=4, width=1, depth=9)
    grower = best_first(limits)
    grower.take(grower.frontier(), Candidates(np.arange(4)[None], np.log(np.float32([[0.4, 0.3, 0.2, 0.1]]))))
    open_node, last = 0.4, 0.2
    for min_gain, is_made in ((0.99 * (open_node - last), True), (1.01 * (open_node - last), False)):
        grower._limits = limits._replace(min_gain=min_gain)
        assert (len(grower.frontier()) > 0) is is_made


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 6))
def test_limits_hold_and_siblings_are_best_first(budget: int, width: int, depth: int) -> None:
    widths: list[int] = []
    tree = grown(best_first(BestFirst(budget, width, depth)), lambda frontier: widths.append(len(frontier)))
    tree.validate(VOCAB, budget)
    assert len(tree) <= budget
    assert tree.depths().max() <= depth
    assert len(widths) <= depth
    assert max(widths, default=0) <= width
    for children in tree.children():
        log_probs = [float(tree.log_probs[node]) for node in sorted(children.values())]
        assert log_probs == sorted(log_probs, reverse=True)


def test_no_step_expands_more_nodes_than_reserved() -> None:
    """Equals at the last place of a tree are all good enough; a session's rows are counted by `max_expansions`."""
    limits = BestFirst(budget=2, width=64, depth=2)
    grower = BestFirstGrower(7, limits, max_children=6, stop_tokens=np.zeros(0, np.int32))
    num_expanded = 0
    while len(frontier := grower.frontier()):
        num_expanded += len(frontier)
        tokens = np.tile(np.arange(6, dtype=np.int32), (len(frontier), 1))
        grower.take(frontier, Candidates(tokens, np.full(tokens.shape, -0.5, np.float32)))
    assert num_expanded <= limits.max_expansions
    assert len(grower.finished()) == 2


def test_growth_ends_when_the_tree_is_full_and_cannot_improve() -> None:
    """SpecExec's third stop rule: with one certain path the depth limit is not what ends growth."""
    widths: list[int] = []
    grown(best_first(BestFirst(budget=3, width=1, depth=30)), lambda frontier: widths.append(len(frontier)))
    assert len(widths) < 10


def test_nothing_grows_below_the_end_of_the_text() -> None:
    tree = grown(best_first(BestFirst(40, 40, 4), stop_tokens=(1, 2)))
    assert any(token in (1, 2) for token in tree.tokens[1:])
    assert all(int(tree.tokens[parent]) not in (1, 2) for parent in tree.parents[1:])


def shaped(growth: Growth, scheme: Scheme, seed: int = 1, stops: Sequence[int] = ()) -> Grower:
    params = SamplingParams(seed=seed, stop_token_ids=frozenset(stops))
    return grower_for(grow_call([3, 1, ROOT], sampling=params, plan=TreePlan(growth, scheme)), 4, VOCAB)


@given(shapes, st.sampled_from(Scheme))
def test_a_shape_is_filled_one_level_per_step(shape: StaticShape, scheme: Scheme) -> None:
    """If the vocabulary is large enough, the tree is the shape, whatever fills it."""
    widths: list[int] = []
    tree = grown(shaped(shape, scheme), lambda frontier: widths.append(len(frontier)))
    tree.validate(VOCAB, shape.budget)
    assert len(widths) <= max(shape.depths())
    fits = max(Counter(shape.parents).values(), default=0) <= VOCAB
    if fits:
        assert tree.parents[1:].tolist() == list(shape.parents)
        assert len(widths) == max(shape.depths())
        assert sum(widths) == shape.max_expansions
    if scheme in SAMPLED:
        assert tree.draft_probs is not None
        assert tree.draft_probs.nodes.tolist() == sorted(set(tree.parents[1:].tolist()))


def test_a_shape_holds_the_best_candidates_in_order() -> None:
    tree = grown(shaped(StaticShape((0, 0, 0, 1, 1)), Scheme.TARGET))
    best = np.argsort(-fake_log_probs([ROOT]))[:3]
    assert tree.tokens[1:4].tolist() == best.tolist()
    assert tree.log_probs[1:4] == pytest.approx(fake_log_probs([ROOT])[best])
    assert tree.tokens[4:].tolist() == np.argsort(-fake_log_probs([ROOT, best[0]]))[:2].tolist()


def test_a_chain_follows_the_drafts_decoding_and_chains_diverge_at_the_root() -> None:
    tree = grown(shaped(StaticShape.chains(1, 4), Scheme.TARGET))
    path = [ROOT]
    for _ in range(4):
        path.append(int(np.argmax(fake_log_probs(path))))
    assert tree.tokens.tolist() == path
    assert grown(shaped(StaticShape.chains(3, 2), Scheme.TARGET)).parents.tolist() == [-1, 0, 0, 0, 1, 2, 3]


@pytest.mark.parametrize("scheme", SAMPLED)
def test_samples_are_repeatable_and_differ_between_rounds(scheme: Scheme) -> None:
    trees = [grown(shaped(StaticShape.chains(3, 3), scheme, seed)) for seed in (1, 1, *range(2, 12))]
    assert trees[0] == trees[1]
    assert len({tuple(tree.tokens.tolist()) for tree in trees}) > 5
    calls = [
        grow_call([3, 1, ROOT], plan=TreePlan(StaticShape.chains(3, 3), scheme), round_=round_) for round_ in range(10)
    ]
    assert len({tuple(grown(grower_for(call, 4, VOCAB)).tokens.tolist()) for call in calls}) > 5


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SAMPLED)
def test_the_first_sample_follows_the_sent_distribution(scheme: Scheme) -> None:
    """Chi-square over 1,000 trees against `draft_probs`: 5 degrees of freedom stay below 40 but for 1.5e-7."""
    firsts = Counter[int]()
    for seed in range(1000):
        tree = grown(shaped(StaticShape.chains(2, 1), scheme, seed))
        assert tree.draft_probs is not None
        firsts[int(tree.tokens[1])] += 1
    tokens, probs = tree.draft_probs.of(0)
    assert probs == pytest.approx(np.exp(fake_log_probs([ROOT]))[tokens], abs=1e-6)
    expected = 1000 * probs
    assert sum((firsts[t] - e) ** 2 / e for t, e in zip(tokens.tolist(), expected, strict=True)) < 40


@pytest.mark.parametrize("scheme", Scheme)
@pytest.mark.parametrize("growth", [StaticShape((0, 0, 0, 1, 2, 3, 4)), StaticShape.chains(4, 3)])
def test_no_shape_grows_below_the_end_of_the_text(growth: Growth, scheme: Scheme) -> None:
    trees = [grown(shaped(growth, scheme, seed, stops=(1, 2, 3))) for seed in range(20)]
    assert any(max(tree.depths()) > 1 for tree in trees)
    for tree in trees:
        assert all(int(tree.tokens[parent]) not in (1, 2, 3) for parent in tree.parents[1:])


def test_a_scheme_that_needs_samples_refuses_best_first() -> None:
    for scheme in SAMPLED:
        with pytest.raises(
            InvalidRequest, match=f"growth: must be a shape for scheme {scheme.value}, .* got best_first"
        ):
            shaped(BestFirst(8, 2, 2), scheme)
