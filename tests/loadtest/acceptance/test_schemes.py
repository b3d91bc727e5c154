"""Acceptance of one level by scheme against brute force on tiny vocabularies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from loadtest.acceptance.rates import (
    Hits,
    Pair,
    best_then_sampled,
    bound_with_replacement,
    bound_without_replacement,
    by_distribution,
    by_sample,
    first_within,
    in_rounds,
    one_after_another,
    placed,
)


def random_pair(seed: int, size: int) -> Pair:
    rng = np.random.default_rng(seed)
    draft = np.sort(rng.dirichlet(np.full(size, 0.7)) + 1e-4)[::-1]
    return Pair(rng.dirichlet(np.full(size + 1, 0.7)), draft / draft.sum())


def all_draws(draft: np.ndarray, k: int, *, repeats: bool) -> dict[frozenset[int], float]:
    """Probability of each set of children."""
    sets: dict[frozenset[int], float] = {}
    for drawn in itertools.product(range(len(draft)), repeat=k):
        probability, left = 1.0, draft.copy()
        for token in drawn:
            probability *= left[token]
            if not repeats:
                left[token] = 0.0
                left /= max(left.sum(), 1e-300)
        if probability:
            sets[frozenset(drawn)] = sets.get(frozenset(drawn), 0.0) + probability
    return sets


def greatest_transport(target: np.ndarray, sets: dict[frozenset[int], float]) -> float:
    """The most mass that flows from sets of children to tokens in them: augmenting paths, shortest first."""
    nodes = ["source", *sets, *range(len(target)), "sink"]
    index = {node: i for i, node in enumerate(nodes)}
    room = np.zeros((len(nodes), len(nodes)))
    for children, probability in sets.items():
        room[0, index[children]] = probability
        for token in children:
            room[index[children], index[token]] = 1.0
    for token, probability in enumerate(target):
        room[index[token], -1] = probability
    flow = 0.0
    while True:
        parent, queue = {0: 0}, [0]
        for node in queue:
            for other in np.flatnonzero(room[node] > 1e-12).tolist():
                if other not in parent:
                    parent[other] = node
                    queue.append(other)
        if len(nodes) - 1 not in parent:
            return flow
        path = [len(nodes) - 1]
        while path[-1]:
            path.append(parent[path[-1]])
        steps = list(itertools.pairwise(path[::-1]))
        amount = min(room[step] for step in steps)
        for one, other in steps:
            room[one, other] -= amount
            room[other, one] += amount
        flow += amount


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_the_bounds_are_the_greatest_transport(seed: int, k: int) -> None:
    pair = random_pair(seed, 4)
    with_repeats, without = (all_draws(pair.draft_probs, k, repeats=repeats) for repeats in (True, False))
    assert bound_with_replacement(pair, k) == pytest.approx(greatest_transport(pair.target_probs, with_repeats))
    expected = greatest_transport(pair.target_probs, without)
    assert bound_without_replacement(pair, k) == pytest.approx(expected, abs=2e-4)


def test_the_race_is_drawing_without_replacement() -> None:
    draft = random_pair(1, 5).draft_probs
    for k in (1, 2, 4):
        sets = all_draws(draft, k, repeats=False)
        expected = [sum(p for s, p in sets.items() if s <= set(range(n))) for n in range(6)]
        assert first_within(draft, k) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("seed", range(6))
def test_no_scheme_passes_its_bound(seed: int) -> None:
    """Shared noise neither: its children are a sample without replacement too. One child: all are the bound but two."""
    pair, sizes, rng = random_pair(seed, 6), [1, 2, 4], np.random.default_rng(seed)
    noise = by_sample(pair, 1.0, rng, num=40_000).of_each(sizes)
    without = one_after_another(pair, sizes, rng, num=2500)
    for index, k in enumerate(sizes):
        assert noise[index] <= bound_without_replacement(pair, k) + 0.02
        assert without[index] <= bound_without_replacement(pair, k) + 0.05
        assert in_rounds(pair, k) <= bound_with_replacement(pair, k) + 1e-9
        assert by_distribution(pair).of_each([k])[0] <= best_then_sampled(pair, k + 1) + 1e-9
    overlap = np.minimum(pair.target_probs[:-1], pair.draft_probs).sum()
    for rate in (in_rounds(pair, 1), best_then_sampled(pair, 1), bound_with_replacement(pair, 1)):
        assert rate == pytest.approx(overlap)
    assert bound_without_replacement(pair, 1) == pytest.approx(overlap, abs=2e-4)
    assert without[0] == pytest.approx(overlap, abs=0.05)


def test_shared_noise_with_one_child_meets_its_closed_form() -> None:
    """P(same argmax) = sum over i of 1 / sum over j of max(target[j] / target[i], draft[j] / draft[i])."""
    pair = random_pair(3, 5)
    target, draft = pair.target_probs, np.append(pair.draft_probs, 0.0)
    expected = sum(1 / np.maximum(target / target[i], draft / draft[i]).sum() for i in range(5))
    (measured,) = by_sample(pair, 1.0, np.random.default_rng(0), num=200_000).of_each([1])
    assert measured == pytest.approx(expected, abs=0.007)


def test_children_are_placed_where_the_draft_is_in_doubt() -> None:
    sure = Hits(np.array([[0.9, 0.1]]), np.array([[1.0, 0.0]]))
    in_doubt = Hits(np.array([[0.5, 0.4]]), np.array([[0.5, 0.5]]))
    assert placed([sure, in_doubt], [1]) == [0.75]
    assert placed([sure, in_doubt, in_doubt], [1, 2]) == [pytest.approx(2 / 3), 1.0]
