"""Two trees of guesses for the same root as one. Knows no models and no wires."""

from __future__ import annotations

import numpy as np

from bough.errors import InvalidTree
from bough.tree import Tree


def merged(tree: Tree, other: Tree, budget: int) -> Tree:
    """The `budget` best-scoring nodes of both trees, best first; what both guess below the same path is one node.

    Such a node has the larger of the two log-probabilities: either estimate may be blind to what the other one knows.
    Only for trees that were not sampled: a sample with additions is none.

    Raises:
        InvalidTree: the roots differ, or there is room for none.
    """
    assert tree.draft_probs is None, "a sample cannot be merged"
    assert other.draft_probs is None, "a sample cannot be merged"
    if tree.tokens[0] != other.tokens[0]:
        raise InvalidTree(f"tree.tokens[0]: {tree.tokens[0]} and {other.tokens[0]}; trees of the same root would do")
    return _best_first(_union(tree, other)).trimmed(budget)


def _union(tree: Tree, other: Tree) -> Tree:
    """The first tree's nodes, then those that only the other has."""
    tokens, parents, log_probs = (array.tolist() for array in (tree.tokens, tree.parents, tree.log_probs))
    children = tree.children()
    places = [0]  # of the other's nodes in the union
    for node in range(1, len(other)):
        token, parent = int(other.tokens[node]), places[other.parents[node]]
        log_prob = float(other.log_probs[node])
        place = children[parent].get(token)
        if place is None:
            place = children[parent][token] = len(tokens)
            tokens.append(token)
            parents.append(parent)
            log_probs.append(log_prob)
            children.append({})
        else:
            log_probs[place] = max(log_probs[place], log_prob)
        places.append(place)
    return Tree.of(tokens, parents, np.minimum(log_probs, 0.0).tolist())  # a hair above is let pass at the wire


def _best_first(tree: Tree) -> Tree:
    """The same tree with its nodes in order of score: parents still come first, for no child scores higher."""
    order = np.argsort(-tree.scores(), kind="stable")
    places = np.argsort(order)
    parents = np.where(tree.parents[order] < 0, -1, places[tree.parents[order]]).astype(np.int32)
    return Tree(tree.tokens[order], parents, tree.log_probs[order])
