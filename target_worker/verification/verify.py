"""Decides which guesses are accepted.

All schemes are one walk. They differ in the distribution from which the token after a node is drawn: the target's own,
or the target's conditional on what the draft has drawn there. A conditional distribution is exact if its average over
draws is the target's; the more of it falls on the draws, the more is accepted. Scheme.TRAVERSAL conditions on the whole
tree, and is exact for whole walks (`target_worker.verification.traversal`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.protocol.messages import Verdict
from bough.trees.tree import Tree
from bough.trees.tree_plan import Scheme

Row = NDArray[np.float64]


class Draw(NamedTuple):
    """A token that a draft has drawn, and the distribution that it was drawn from."""

    token: int
    tokens: NDArray[np.int32]  # (num_entries,)
    probs: Row  # (num_entries,), sums to 1

    @property
    def prob(self) -> float:
        """Probability of the drawn token."""
        return float(self.probs[self.tokens == self.token].sum())


def walk(tree: Tree, draw: Callable[[Sequence[int]], int]) -> Verdict:
    """Walk down while the drawn token is among the children (SpecExec, arXiv 2406.02532, algorithm 1).

    `draw` takes a path of nodes from the root and returns the token after it.
    """
    path, token = tree.walk(draw)
    return Verdict(tuple(path[1:]), token)


def draws_at(tree: Tree, node: int, scheme: Scheme, vocab_size: int) -> Iterator[Draw]:
    """Yield the draft's draws below a node in order; nothing if the scheme does not use them."""
    if not scheme.is_sampled:
        return
    drawn_tokens = tree.tokens[tree.sampled_children(node, scheme)]
    if len(drawn_tokens) == 0:
        return
    assert tree.draft_probs is not None, "checked with the tree"
    tokens, probs = tree.draft_probs.of(node)
    for index, token in enumerate(drawn_tokens.tolist()):
        yield Draw(token, tokens, probs)
        is_left = tokens != token
        tokens, probs = tokens[is_left], probs[is_left]
        if len(tokens) == 0:
            others = np.setdiff1d(np.arange(vocab_size, dtype=np.int32), drawn_tokens[: index + 1])
            tokens, probs = others, np.ones(len(others))
        probs = probs / probs.sum()


def conditional_distribution(target_probs: Row, draws: Iterable[Draw]) -> Row:
    """Distribution (vocab_size,) of the next token, given a draft's draws.

    This is rejection sampling, draw by draw, with the random numbers integrated out: a draw is accepted with
    probability min(1, target / draft); otherwise the target's distribution becomes the normalised positive part of
    target - draft. With `draws_at` this is Sequoia's algorithm 2 (arXiv 2402.12374).
    """
    distribution, left, rest = np.zeros_like(target_probs), target_probs.copy(), 1.0
    for draw in draws:
        token, tokens, probs = draw
        acceptance = min(1.0, left[token] / draw.prob)
        distribution[token] += rest * acceptance
        rest *= 1.0 - acceptance
        before = left[tokens]
        left[tokens] = np.maximum(before - probs, 0.0)
        total = left.sum()
        if total > 0.0:
            left /= total
        else:  # everything was covered: a rejection is due to rounding only
            left[tokens] = before
    distribution += rest * left
    return distribution
