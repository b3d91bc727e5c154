"""All outcomes of multi-round verification with a draft of 0.9 A and 0.1 B and a target of 0.5 A and 0.5 B."""

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

A, B = 0, 1
TARGET_PROBS, DRAWN_PROBS = np.array([0.5, 0.5]), np.array([0.9, 0.1])
DRAFT_PROBS = DraftProbs.joined({0: (np.array([A, B], np.int32), np.array([0.9, 0.1], np.float32))})
NINTHS = 9  # every probability of a verdict, given the draws, is a multiple of 1/9


class Case(NamedTuple):
    """An outcome of the draws and the verdict on them."""

    drawn: tuple[int, ...]
    tree: Tree
    verdict: Verdict
    times: int  # expected number among `num_cases` rounds, which is whole


def sample(token: int) -> Tree:
    """A tree with this token as its only guess."""
    return replace(Tree.of([0, token], [-1, 0], [0.0, 0.0]), draft_probs=DRAFT_PROBS)


def num_cases(num_draws: int) -> int:
    """The number of rounds in which every outcome's expected count is whole."""
    return int(NINTHS * 10**num_draws)


def cases(num_draws: int) -> Iterator[Case]:
    """Every outcome of `num_draws` draws below a root; a token drawn twice is one node."""
    for drawn in itertools.product((A, B), repeat=num_draws):
        tree = merged([sample(token) for token in drawn])
        chance = np.prod(DRAWN_PROBS[list(drawn)])
        law = multi_round_law(tree, 0, TARGET_PROBS)
        for token in (A, B):
            accepted = tuple(tree.along([token]))
            times = num_cases(num_draws) * float(chance * law[token])
            assert abs(times - round(times)) < 1e-2  # draft probabilities are single precision
            yield Case(drawn, tree, Verdict(accepted, token), round(times))
