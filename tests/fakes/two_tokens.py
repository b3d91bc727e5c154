"""A draft of 0.9 A and 0.1 B before a target of 0.5 each: all that multi-round verification can make of some draws."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bough.protocol.messages import Verdict
from bough.trees.draft_probs import DraftProbs
from bough.trees.tree import Tree
from loadtest.acceptance.multi_round import merged, multi_round_law
from loadtest.acceptance.rates import Pair

A, B = 0, 1
PAIR = Pair(np.array([0.5, 0.5, 0.0]), np.array([0.9, 0.1]))
DRAFT_PROBS = DraftProbs.joined({0: (np.array([A, B], np.int32), np.array([0.9, 0.1], np.float32))})
NINTHS = 9  # every chance of a verdict, given the draws, is some of these


class Case(NamedTuple):
    """One outcome of the draws and of the verdict on them."""

    drawn: tuple[int, ...]
    tree: Tree
    verdict: Verdict
    times: int  # of `num_cases` rounds, exactly


def sample(token: int) -> Tree:
    """A chain of this token alone."""
    return replace(Tree.of([0, token], [-1, 0], [0.0, 0.0]), draft_probs=DRAFT_PROBS)


def num_cases(num_draws: int) -> int:
    """So many rounds have every outcome as often as it is likely."""
    return int(NINTHS * 10**num_draws)


def cases(num_draws: int) -> Iterator[Case]:
    """Every outcome of so many draws below a root; what has been drawn twice is one node."""
    for drawn in itertools.product((A, B), repeat=num_draws):
        tree = merged([sample(token) for token in drawn])
        chance = np.prod(PAIR.draft_probs[list(drawn)])
        law = multi_round_law(tree, 0, PAIR.target_probs[:2])
        for token in (A, B):
            accepted = tuple(tree.along([token]))
            times = num_cases(num_draws) * float(chance * law[token])
            assert abs(times - round(times)) < 1e-2  # draft probabilities are single precision
            yield Case(drawn, tree, Verdict(accepted, token), round(times))
