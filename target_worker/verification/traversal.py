"""Verification that looks at whole paths (traversal verification, arXiv 2505.12398).

Who rejects token by token gives up all that stands below a token with it. Traversal verification judges a tree from its
leaves to its root, each node by the probability of its whole path: where the rest of a path is likelier than the draft
took it for, the path is kept although one of its tokens was less likely. Children are sampled without replacement, as
for Sequoia's rule, than which it accepts more of the same trees (docs/decisions/004-target-scheme-by-default.md). Of a
chain it is block verification (arXiv 2403.10444), than which no exact rule accepts more there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bough.trees.tree import IntArray, Tree
from bough.trees.tree_plan import Scheme
from target_worker.verification.verify import Draw, Row, draws_at

NONE: IntArray = np.zeros(0, np.int32)


class Refused(NamedTuple):
    """A node some of whose children were refused."""

    presence: float  # probability of being there then
    probs: Row  # (num_entries,) of the next token then, of those that the draft may have drawn
    others: float  # of all other tokens together


class Traversal:
    """The laws of the tokens after the nodes of a tree, given all that the draft has drawn in it.

    Algorithm 2 of the paper with its random numbers integrated out: a child is there with a probability that follows
    from its ancestors and from those of their children which were refused before, and what is below it is accepted with
    one that follows from its descendants. So a walk from the root may draw token after token, as with any other scheme.
    """

    def __init__(self, tree: Tree, target_probs: Callable[[int], Row]) -> None:
        """`target_probs` gives the target's own (vocab_size,) after a node; it is asked where there are children."""
        self._tree = tree
        nodes = range(len(tree))
        self._children = [
            tree.sampled_children(node, Scheme.TRAVERSAL).tolist() for node in nodes
        ]  # those that were drawn
        self._presence = np.ones(len(tree))  # of a node, when those of its siblings that come before were refused
        self._accepted = np.ones(len(tree))  # of it or of something below it, then
        for node, children in enumerate(self._children):  # parents come before their children
            left = self._presence[node]
            if children and left > 0.0:
                left = self._refuse_all(node, target_probs(node))[1].presence
            elif children:
                self._presence[children] = 0.0
            self._accepted[node] = left  # itself, and as yet nothing below it
        for node in reversed(nodes):
            for child in reversed(self._children[node]):
                self._accepted[node] = 1.0 - (1.0 - self._accepted[node]) * (1.0 - self._accepted[child])

    def law(self, node: int, target_probs: Row) -> Row:
        """(vocab_size,) probabilities of the token after a node, where that or something below it is accepted."""
        tokens, refused = self._refuse_all(node, target_probs)
        bonus = _without(target_probs, tokens)
        if (mass := bonus.sum()) > 0.0:
            bonus = bonus / mass * refused.others  # a mass may be so small that nothing can be divided by it alone
        bonus[tokens] = refused.probs
        law, rest = np.zeros_like(bonus), 1.0
        for child in self._children[node]:
            law[self._tree.tokens[child]] += rest * self._accepted[child]
            rest *= 1.0 - self._accepted[child]
        law += rest * refused.presence * bonus
        total = law.sum()
        return law / total if total > 0.0 else bonus

    def _refuse_all(self, node: int, target_probs: Row) -> tuple[IntArray, Refused]:
        """Tokens that may have been drawn below a node, and what is left when all its children were refused.

        Notes with what probability each child is there.
        """
        vocab_size = len(target_probs)
        draws = self._draws(node, vocab_size)
        tokens = draws[0].tokens if draws else NONE
        if len(draws) > len(tokens):  # exhausted: what came after these was drawn from all others
            tokens = np.arange(vocab_size, dtype=np.int32)
        places = np.zeros(vocab_size, np.int32)
        places[tokens] = np.arange(len(tokens), dtype=np.int32)
        others = float(_without(target_probs, tokens).sum())
        left = Refused(self._presence[node], target_probs[tokens], others)
        for child, draw in zip(self._children[node], draws, strict=True):
            target_prob = left.probs[places[draw.token]]
            self._presence[child] = min(1.0, left.presence * target_prob / draw.prob)
            left = _refuse(left, places[draw.tokens], draw.probs)
        return tokens, left

    def _draws(self, node: int, vocab_size: int) -> Sequence[Draw]:
        return [*draws_at(self._tree, node, Scheme.TRAVERSAL, vocab_size)]


def _refuse(before: Refused, places: IntArray, draft_probs: Row) -> Refused:
    """What of the target's probability a draw does not cover that was made with these."""
    probs, others = before.presence * before.probs, before.presence * before.others
    probs[places] = np.maximum(probs[places] - draft_probs, 0.0)
    total = float(probs.sum()) + others
    if total == 0.0:  # all of it was covered: who was surely there is so but for rounding
        return before._replace(presence=float(before.presence == 1.0))
    return Refused(total / (total + (1.0 - before.presence)), probs / total, others / total)


def _without(probs: Row, tokens: IntArray) -> Row:
    rest = probs.copy()
    rest[tokens] = 0.0
    return rest
