"""Traversal verification (arXiv 2505.12398), which accepts or rejects whole paths.

Token-by-token verification that rejects a token loses everything below it. Traversal verification judges a tree from
its leaves to its root, each node by the probability of its whole path: a path whose rest is more likely than the draft
estimated is kept although one of its tokens was less likely. Children are sampled without replacement, as in Sequoia's
rule, and more of the same trees is accepted (docs/decisions/004-target-scheme-by-default.md). On a chain this equals
block verification (arXiv 2403.10444), which is optimal among exact rules there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bough.trees.tree import IntArray, Tree
from bough.trees.tree_plan import Scheme
from target_worker.verification.verify import Draw, Row, draws_at

NONE: IntArray = np.zeros(0, np.int32)


class Rejected(NamedTuple):
    """The state at a node after some of its children were rejected."""

    presence: float  # probability that the node is reached in this state
    probs: Row  # (num_entries,) of the next token, for tokens that the draft may have drawn
    others: float  # probability of all other tokens together


class Traversal:
    """Distributions of the tokens after nodes of a tree, given all that the draft has drawn in it.

    This is algorithm 2 of the paper with its random numbers integrated out: the probability that a child is reached
    follows from its ancestors and its rejected siblings, and the probability that something below it is accepted
    follows from its descendants. So a walk from the root draws token after token, as in every other scheme.
    """

    def __init__(self, tree: Tree, target_probs: Callable[[int], Row]) -> None:
        """`target_probs` returns the target's distribution (vocab_size,) after a node that has children."""
        self._tree = tree
        nodes = range(len(tree))
        self._children = [tree.sampled_children(node, Scheme.TRAVERSAL).tolist() for node in nodes]
        # By node: the probability that it is reached, if its earlier siblings were rejected.
        self._presence = np.ones(len(tree))
        self._accepted = np.ones(len(tree))  # by node: probability that it or something below it is then accepted
        for node, children in enumerate(self._children):  # parents come before their children
            left = self._presence[node]
            if children and left > 0.0:
                left = self._reject_all(node, target_probs(node))[1].presence
            elif children:
                self._presence[children] = 0.0
            self._accepted[node] = left  # of the node itself, without its descendants
        for node in reversed(nodes):
            for child in reversed(self._children[node]):
                self._accepted[node] = 1.0 - (1.0 - self._accepted[node]) * (1.0 - self._accepted[child])

    def distribution_after(self, node: int, target_probs: Row) -> Row:
        """Distribution (vocab_size,) of the token after a node, if the node or something below it is accepted."""
        tokens, rejected = self._reject_all(node, target_probs)
        bonus = _without(target_probs, tokens)
        if (mass := bonus.sum()) > 0.0:
            bonus = bonus / mass * rejected.others  # dividing by the mass alone could overflow
        bonus[tokens] = rejected.probs
        distribution, rest = np.zeros_like(bonus), 1.0
        for child in self._children[node]:
            distribution[self._tree.tokens[child]] += rest * self._accepted[child]
            rest *= 1.0 - self._accepted[child]
        distribution += rest * rejected.presence * bonus
        total = distribution.sum()
        return distribution / total if total > 0.0 else bonus

    def _reject_all(self, node: int, target_probs: Row) -> tuple[IntArray, Rejected]:
        """Tokens that may have been drawn below a node, and the state after all its children were rejected.

        Stores the probability that each child is reached.
        """
        vocab_size = len(target_probs)
        draws = self._draws(node, vocab_size)
        tokens = draws[0].tokens if draws else NONE
        if len(draws) > len(tokens):  # all entries were drawn; further draws were from all other tokens
            tokens = np.arange(vocab_size, dtype=np.int32)
        places = np.zeros(vocab_size, np.int32)
        places[tokens] = np.arange(len(tokens), dtype=np.int32)
        others = float(_without(target_probs, tokens).sum())
        left = Rejected(self._presence[node], target_probs[tokens], others)
        for child, draw in zip(self._children[node], draws, strict=True):
            target_prob = left.probs[places[draw.token]]
            self._presence[child] = min(1.0, left.presence * target_prob / draw.prob)
            left = _reject(left, places[draw.tokens], draw.probs)
        return tokens, left

    def _draws(self, node: int, vocab_size: int) -> Sequence[Draw]:
        return [*draws_at(self._tree, node, Scheme.TRAVERSAL, vocab_size)]


def _reject(before: Rejected, places: IntArray, draft_probs: Row) -> Rejected:
    """The state after rejecting a draw: the target's probability minus the part that the draw covers."""
    probs, others = before.presence * before.probs, before.presence * before.others
    probs[places] = np.maximum(probs[places] - draft_probs, 0.0)
    total = float(probs.sum()) + others
    if total == 0.0:  # covered entirely: a certain node stays certain despite rounding
        return before._replace(presence=float(before.presence == 1.0))
    return Rejected(total / (total + (1.0 - before.presence)), probs / total, others / total)


def _without(probs: Row, tokens: IntArray) -> Row:
    rest = probs.copy()
    rest[tokens] = 0.0
    return rest
