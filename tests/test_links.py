"""Which expansion stands below which, against a dictionary: in what a draft has explored, and along trees."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draft_worker.explored import Explored
from draft_worker.grow import Candidates

VOCAB = 5
steps = st.lists(st.lists(st.tuples(st.integers(-1, 200), st.integers(0, VOCAB - 1)), max_size=20), max_size=10)
nodes = st.lists(st.tuples(st.integers(-1, 200), st.integers(0, VOCAB - 1)), max_size=40)
Place = tuple[int, int]  # the parent's expansion, token


def explored_in(steps: list[list[Place]]) -> tuple[Explored, dict[Place, int]]:
    """Step by step what is new of it, below what is there; and which expansion each became."""
    explored, index = Explored(0), dict[Place, int]()
    for step in steps:
        new = [place for place in dict.fromkeys(step) if place[0] < len(index) and place not in index]
        if new:
            parents, tokens = np.ascontiguousarray(np.array(new, np.int32).T)
            certain = Candidates(np.zeros((len(new), 1), np.int32), np.zeros((len(new), 1), np.float32))
            index |= {place: len(index) + i for i, place in enumerate(new)}
            explored.learn(explored.wanted(parents, tokens), certain)
    return explored, index


@given(steps)
def test_every_expansion_is_found_below_its_parent_and_no_other(steps: list[list[Place]]) -> None:
    explored, index = explored_in(steps)
    places = [(parent, token) for parent in range(-1, len(index)) for token in range(VOCAB)]
    parents, tokens = np.ascontiguousarray(np.array(places, np.int32).T)
    assert explored.find(parents, tokens).tolist() == [index.get(place, -1) for place in places]


@given(steps, nodes)
def test_a_trees_nodes_are_found_as_far_as_they_are_explored(steps: list[list[Place]], nodes: list[Place]) -> None:
    explored, index = explored_in(steps)
    below = [(min(parent, number - 1), token) for number, (parent, token) in enumerate(nodes)]
    expected: list[int] = []
    for parent, token in below:
        above = expected[parent] if parent >= 0 else -1
        expected.append(index.get((above, token), -1) if parent < 0 or above >= 0 else -1)
    parents, tokens = np.ascontiguousarray(np.array(below, np.int32).reshape(-1, 2).T)
    assert explored.find_tree(parents, tokens).tolist() == expected


@given(steps, st.lists(st.integers(0, VOCAB - 1), max_size=6))
def test_a_walk_ends_where_nothing_is_explored(steps: list[list[Place]], tokens: list[int]) -> None:
    explored, index = explored_in(steps)
    path: list[int] = []
    while len(path) < len(tokens) and (place := (path[-1] if path else -1, tokens[len(path)])) in index:
        path.append(index[place])
    assert explored.walk(tokens) == path
