"""Merging two draft trees of the same root."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bough.errors import InvalidTree
from bough.trees.tree import Tree


def merged(tree: Tree, other: Tree, budget: int) -> Tree:
    """The `budget` best-scoring nodes of the union of both trees, best first.

    A node in both trees gets the larger of its two estimates. A sampled first tree is kept whole, with all
    added nodes after it and no trimming: `draws` lists the sampled nodes, by which the scheme verifies; added nodes
    count only if the target draws their tokens itself.

    Raises:
        InvalidTree: the roots differ, or `budget` is below 1.
    """
    assert other.draft_probs is None, "only the first tree may be sampled"
    if tree.tokens[0] != other.tokens[0]:
        raise InvalidTree("tree.tokens[0]", "must be the same in both trees", f"{tree.tokens[0]} and {other.tokens[0]}")
    both = union(tree, other)
    if tree.draft_probs is None:  # parents stay first when sorted, as no child scores higher than its parent
        return both.only(np.argsort(-both.scores(), kind="stable")).trimmed(budget)
    draws = np.arange(1, len(tree), dtype=np.int32) if tree.draws is None else tree.draws
    return replace(both, draft_probs=tree.draft_probs, draws=draws)


def union(tree: Tree, other: Tree) -> Tree:
    """The first tree's nodes, then those only in the other; the `worth` of shared nodes is the larger estimate."""
    known = dict(zip(tree.keys().tolist(), range(len(tree)), strict=True))
    worth, others = tree.estimates.copy(), other.estimates
    added: list[int] = []  # nodes of `other`
    parents_of_added: list[int] = []
    places = [0]  # index in the union of each node of `other`
    for node in range(1, len(other)):
        parent = places[other.parents[node]]
        place = known.get(parent << 32 | int(other.tokens[node]))
        if place is None:
            place = len(tree) + len(added)
            added.append(node)
            parents_of_added.append(parent)
        else:
            worth[place] = max(worth[place], others[node])
        places.append(place)
    return Tree(
        np.concatenate((tree.tokens, other.tokens[added])),
        np.concatenate((tree.parents, np.array(parents_of_added, np.int32))),
        np.concatenate((tree.log_probs, other.log_probs[added])),
        worth=np.minimum(np.concatenate((worth, others[added])), 0.0),  # validation tolerates rounding above 0
    )
