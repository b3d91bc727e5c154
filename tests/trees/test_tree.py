"""Trees: validity, masks and paths against naive definitions, trimming, and the wire."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import InvalidTree
from bough.pb import common_pb2
from bough.protocol import codec
from bough.trees.tree import Tree, along_paths

VOCAB = 1000
NUMBERS, TOKENS, LOG_PROBS = st.integers(0, 1 << 16), st.integers(0, VOCAB - 1), st.floats(-20, 0, width=32)


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 40) -> Tree:
    """Valid trees of every shape: any earlier node may be the parent, siblings have distinct tokens."""
    size = draw(st.integers(1, max_nodes))

    def several(kind: st.SearchStrategy, count: int) -> list:
        return draw(st.lists(kind, min_size=count, max_size=count))

    parents = [-1, *(number % node for node, number in enumerate(several(NUMBERS, size - 1), 1))]
    tokens, used = [], dict.fromkeys(parents, frozenset[int]())
    for parent, token in zip(parents, several(TOKENS, size), strict=True):
        while token in used[parent]:
            token = (token + 1) % VOCAB
        used[parent] |= {token}
        tokens.append(token)
    return Tree.of(tokens, parents, [0.0, *several(LOG_PROBS, size - 1)])


def naive_path(tree: Tree, node: int) -> list[int]:
    return [] if node < 0 else [*naive_path(tree, int(tree.parents[node])), node]


@given(trees())
def test_trees_of_every_shape_are_valid_and_derived_arrays_equal_their_definitions(tree: Tree) -> None:
    tree.validate(VOCAB, max_nodes=len(tree))
    table, ancestors, depths, scores = tree.path_table(), tree.ancestors(), tree.depths(), tree.scores()
    sums = along_paths(np.add, np.arange(len(tree)), ancestors)
    for node in range(len(tree)):
        path = naive_path(tree, node)
        assert tree.path(node) == path
        assert depths[node] == len(path) - 1
        assert table[node, : len(path)].tolist() == path
        assert sums[node] == sum(path)
        assert [above[node] for above in ancestors] == [
            [0, *path][-1 - min(2**level, len(path))] for level in range(len(ancestors))
        ]
        assert scores[node] == pytest.approx(sum(tree.log_probs[step] for step in path), abs=1e-3)
        assert tree.children()[node] == {
            int(tree.tokens[child]): child for child in range(1, len(tree)) if tree.parents[child] == node
        }


@given(st.lists(st.floats(-1e-7, 1e-7), min_size=1, max_size=40))
def test_rounding_never_puts_a_node_above_its_parent(log_probs: list[float]) -> None:
    scores = Tree.of(range(len(log_probs) + 1), range(-1, len(log_probs)), [0.0, *log_probs]).scores()
    assert (np.diff(scores) <= 0).all()


@given(trees(), st.integers(1, 45))
def test_trimming_keeps_the_best_nodes_connected_and_in_order(tree: Tree, budget: int) -> None:
    trimmed = tree.trimmed(budget)
    trimmed.validate(VOCAB, max_nodes=budget)
    assert len(trimmed) == min(budget, len(tree))
    best = sorted(tree.scores().tolist(), reverse=True)[: len(trimmed)]
    assert sorted(trimmed.scores().tolist(), reverse=True) == pytest.approx(best, abs=1e-4)


@given(trees(), st.data())
def test_tokens_are_followed_as_far_as_the_tree_has_them(tree: Tree, data: st.DataObject) -> None:
    path = tree.path(data.draw(st.integers(0, len(tree) - 1)))[1:]
    tokens = [int(tree.tokens[node]) for node in path]
    assert tree.along(tokens) == path
    assert tree.along([*tokens, VOCAB]) == path
    assert tree.along([VOCAB, *tokens]) == []


def test_trimming_to_nothing_is_refused() -> None:
    with pytest.raises(InvalidTree, match="budget: must be at least 1, got 0"):
        Tree.root(1).trimmed(0)


@given(trees())
def test_a_tree_round_trips_over_the_wire(tree: Tree) -> None:
    for each in (tree, replace(tree, worth=tree.log_probs / 2) if len(tree) > 1 else tree):
        data = codec.tree_to_wire(each).SerializeToString()
        assert codec.tree_from_wire(common_pb2.Tree.FromString(data)) == each


def test_a_256_node_tree_is_small_on_the_wire() -> None:
    """A tree of 256 nodes takes about 1 KB for tokens and parents; log-probabilities are 4 bytes each on top."""
    tree = Tree.of(range(1000, 1256), [-1, *range(255)], [0.0] + [-1.0] * 255)
    assert codec.tree_to_wire(tree).ByteSize() < 2200


@pytest.mark.parametrize(
    ("tokens", "parents", "log_probs", "message"),
    [
        ([], [], [], "tree: must have at least one node"),
        ([1, 2], [-1], [0.0, -1.0], "got 2 tokens, 1 parents and 2 log_probs"),
        ([1, 2, 3], [-1, 2, 1], [0, -1, -1], r"parents\[1\]: must be 0 to 0, before its child, got 2"),
        ([1, 2], [-1, 1], [0, -1], r"parents\[1\]: must be .* got 1"),
        ([1, 2], [-1, -1], [0, -1], r"parents\[1\]: must be .* got -1"),
        ([1, 2], [0, 0], [0, -1], r"parents\[0\]: must be -1, as the root has no parent, got 0"),
        ([1, VOCAB], [-1, 0], [0, -1], rf"tokens\[1\]: must be 0 to {VOCAB - 1}, got {VOCAB}"),
        ([-1], [-1], [0], r"tokens\[0\]: must be .* got -1"),
        ([1, 5, 5], [-1, 0, 0], [0, -1, -1], r"tokens\[2\]: must differ .* got 5, the token of node 1"),
        ([1, 5], [-1, 0], [0, float("nan")], r"log_probs\[1\]: must be at most 0, got nan"),
        ([1, 5], [-1, 0], [0, 0.5], r"log_probs\[1\]: must be at most 0, got 0.5"),
        ([1, 2, 3, 4, 5], [-1, 0, 1, 2, 3], [0] * 5, "must have at most 4 nodes, got 5"),
    ],
)
def test_invalid_trees_are_refused_naming_the_node(
    tokens: list[int], parents: list[int], log_probs: list[float], message: str
) -> None:
    with pytest.raises(InvalidTree, match=message):
        Tree.of(tokens, parents, log_probs).validate(VOCAB, max_nodes=4)


@pytest.mark.parametrize(
    ("draws", "message"),
    [
        ([0], r"tree\.draws: must be nodes from 1 to 3, got 0"),
        ([4], r"tree\.draws: must be nodes from 1 to 3, got 4"),
        ([1, 2, 2], r"tree\.draws: must have each node at most once, got 3 draws of 2 nodes"),
        ([2], r"tree\.draws: must include the parent of each node, got node 2 without 1"),
    ],
)
def test_impossible_draws_are_refused(draws: list[int], message: str) -> None:
    tree = Tree.of([1, 2, 3, 4], [-1, 0, 1, 0], [0.0, -1.0, -1.0, -1.0])
    replace(tree, draws=np.array([1, 2], np.int32)).validate(VOCAB, max_nodes=4)
    with pytest.raises(InvalidTree, match=message):
        replace(tree, draws=np.array(draws, np.int32)).validate(VOCAB, max_nodes=4)


@pytest.mark.parametrize(
    ("worth", "message"),
    [
        ([0.0], r"tree\.worth: must be empty or have one entry for each node, got 1"),
        ([0.0, 0.5], r"tree\.worth\[1\]: must be at most 0, got 0\.5"),
        ([0.0, float("nan")], r"tree\.worth\[1\]: must be at most 0, got nan"),
    ],
)
def test_an_impossible_value_is_refused(worth: list[float], message: str) -> None:
    with pytest.raises(InvalidTree, match=message):
        replace(Tree.of([1, 2], [-1, 0], [0.0, -1.0]), worth=np.array(worth, np.float32)).validate(VOCAB, 4)


@given(trees(), st.integers(1, 45))
def test_calibrated_probabilities_decide_which_nodes_are_best_and_are_kept(tree: Tree, budget: int) -> None:
    turned = replace(tree, worth=(-20 - tree.log_probs) * (np.arange(len(tree)) > 0).astype(np.float32))
    trimmed = turned.trimmed(budget)
    assert trimmed.worth is not None
    assert sorted(trimmed.scores().tolist()) == pytest.approx(
        sorted(turned.scores().tolist())[-len(trimmed) :], abs=1e-3
    )
    pairs = zip(trimmed.log_probs.tolist(), trimmed.worth.tolist(), strict=True)
    assert {*pairs} <= {*zip(turned.log_probs.tolist(), turned.worth.tolist(), strict=True)}


def test_a_parent_too_large_for_int32_is_refused_and_not_wrapped() -> None:
    message = common_pb2.Tree(tokens=[1, 2], parents=[2**32 - 1], log_probs=[-1.0])
    with pytest.raises(InvalidTree, match=r"parents\[1\]"):
        codec.tree_from_wire(message).validate(VOCAB, max_nodes=4)
