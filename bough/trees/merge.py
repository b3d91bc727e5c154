"""Two trees of guesses for the same root as one. Knows no models and no wires."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bough.errors import InvalidTree
from bough.trees.tree import Tree


def merged(tree: Tree, other: Tree, budget: int) -> Tree:
    """The `budget` best-scoring nodes of both trees, best first; what both guess below the same path is one node.

    Such a node has the larger of the two log-probabilities: either estimate may be blind to what the other one knows.
    Where the first tree was sampled it stays as it is, and all of the other comes behind it: `draws` tells apart what
    was drawn, by which the target judges, and what was added, where it may go on if it draws that itself.

    Raises:
        InvalidTree: the roots differ, or there is room for none.
    """
    assert other.draft_probs is None, "only the first may be a sample"
    if tree.tokens[0] != other.tokens[0]:
        raise InvalidTree(f"tree.tokens[0]: {tree.tokens[0]} and {other.tokens[0]}; trees of the same root would do")
    both = union(tree, other)
    if tree.draft_probs is None:
        return _best_first(both).trimmed(budget)
    draws = np.arange(1, len(tree), dtype=np.int32) if tree.draws is None else tree.draws
    return replace(both, draft_probs=tree.draft_probs, draws=draws)


def union(tree: Tree, other: Tree) -> Tree:
    """The first tree's nodes, then those that only the other has; what both have has the larger log-probability."""
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
