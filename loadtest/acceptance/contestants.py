"""Ways of growing and verifying trees that `loadtest.acceptance` compares."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from bough.trees.acceptance import Acceptance
from bough.trees.optimal_tree import best_chains, best_shape
from bough.trees.tree_plan import BestFirst, Growth, Guess, Scheme, StaticShape, TreePlan

LEVELS = 18  # most levels of shapes and chains
EVERYONE = ""  # a filter that every name contains


class Contestant(NamedTuple):
    """A way of growing and verifying trees; its growth depends on the budget and on acceptance measured before."""

    scheme: Scheme
    guess: Guess
    growth: Callable[[Acceptance, int], Growth]
    is_multi_round: bool = False  # independently sampled chains, verified as in SpecInfer
    is_calibrated: bool = True  # whether the draft learns its temperature scaling

    def plan(self, acceptance: Acceptance, nodes: int) -> TreePlan:
        """The plan for trees of `num_nodes` nodes."""
        return TreePlan(self.growth(acceptance, nodes), self.scheme, self.guess)


def grown_best_first(_: Acceptance, nodes: int) -> Growth:
    """Best-first growth with a width suited to the budget."""
    width = max(2, min(32, nodes // 8))
    return BestFirst(nodes, width, min(LEVELS - 1, nodes - 1))


def _shape(acceptance: Acceptance, nodes: int) -> Growth:
    return best_shape(acceptance, nodes, LEVELS)


def _chains(acceptance: Acceptance, nodes: int) -> Growth:
    best = best_chains(acceptance, nodes, LEVELS)
    return StaticShape.chains(best.num, best.length)


def _chain(_: Acceptance, nodes: int) -> Growth:
    return StaticShape.chains(1, min(LEVELS, nodes) - 1)


DRAWN = {  # above temperature 0
    "bough: target, best-first, shared noise": Contestant(Scheme.TARGET, Guess.SAMPLE, grown_best_first),
    "target, optimal shape, shared noise": Contestant(Scheme.TARGET, Guess.SAMPLE, _shape),
    "SpecExec: target, best-first": Contestant(
        Scheme.TARGET, Guess.DISTRIBUTION, grown_best_first, is_calibrated=False
    ),
    "target, optimal top-k shape": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, _shape),
    "Sequoia: without replacement, optimal shape": Contestant(Scheme.WITHOUT_REPLACEMENT, Guess.SAMPLE, _shape),
    "SpecInfer: multi-round, k chains": Contestant(Scheme.WITHOUT_REPLACEMENT, Guess.SAMPLE, _chains, True),
}
DRAWN_CROSSED = {  # the other growths of each scheme
    "target, best-first, shared noise, as sure as the draft": Contestant(
        Scheme.TARGET, Guess.SAMPLE, grown_best_first, is_calibrated=False
    ),
    "target, best-first": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, grown_best_first),
    "target, k chains, shared noise": Contestant(Scheme.TARGET, Guess.SAMPLE, _chains),
    "target, one chain, shared noise": Contestant(Scheme.TARGET, Guess.SAMPLE, _chain),
    "traversal, optimal shape": Contestant(Scheme.TRAVERSAL, Guess.SAMPLE, _shape),
    "without replacement, k chains": Contestant(Scheme.WITHOUT_REPLACEMENT, Guess.SAMPLE, _chains),
    "without replacement, one chain": Contestant(Scheme.WITHOUT_REPLACEMENT, Guess.SAMPLE, _chain),
}
GREEDY = {  # at temperature 0, where all schemes agree
    "bough: target, best-first": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, grown_best_first),
    "SpecExec: target, best-first": Contestant(
        Scheme.TARGET, Guess.DISTRIBUTION, grown_best_first, is_calibrated=False
    ),
    "target, optimal top-k shape": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, _shape),
    "greedy k chains": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, _chains),
}
GREEDY_CROSSED = {"greedy, one chain": Contestant(Scheme.TARGET, Guess.DISTRIBUTION, _chain)}


def contestants_at(temperature: float, arguments: argparse.Namespace) -> dict[str, Contestant]:
    """The contestants of the tables, filtered by `--contestants`."""
    usual, others = (GREEDY, GREEDY_CROSSED) if temperature == 0 else (DRAWN, DRAWN_CROSSED)
    of_table = (others if arguments.crossed else usual).items()
    return {name: one for name, one in of_table if any(wanted in name for wanted in arguments.contestants)}
