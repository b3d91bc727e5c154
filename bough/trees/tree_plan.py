"""Plans for growing and verifying a round's tree, as plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from bough.errors import InvalidRequest

MAX_EXPANSIONS = 2048  # nodes of one tree that the draft model runs on; each takes a row of the session's KV slot


class Scheme(Enum):
    """The rule by which the target accepts guesses. All are exact; they differ in what the draft must send."""

    TARGET = "target"  # SpecExec: the target samples, guesses that equal its samples are kept
    WITHOUT_REPLACEMENT = "without-replacement"  # Sequoia: children were sampled without replacement
    TRAVERSAL = "traversal"  # judges whole paths (arXiv 2505.12398): children were sampled without replacement

    @property
    def is_sampled(self) -> bool:
        """Whether the draft samples children (without replacement) and sends their distributions."""
        return self is not Scheme.TARGET


class Guess(Enum):
    """How the draft ranks the children of a node for Scheme.TARGET."""

    SAMPLE = "sample"  # by the token that the target will sample, predicted with the shared random numbers
    DISTRIBUTION = "distribution"  # by probability alone, as in the papers


class BestFirst(NamedTuple):
    """Growth of the most probable paths first (SpecExec, arXiv 2406.02532, section 4.2), while they pay.

    At lambda tokens per second a draft step costs lambda times its own seconds (docs/design.md, rule 5).
    """

    budget: int  # nodes, the root included
    width: int  # nodes expanded in one draft step
    depth: int  # levels below the root
    min_gain: float = 0.0  # in expected tokens: growth ends when a step cannot add this many
    seconds: float = 0.0  # after the call's arrival, when growth ends; 0 is no limit

    @property
    def max_expansions(self) -> int:
        """Upper bound on the nodes that the draft model runs on."""
        return min(self.width, self.budget) * self.depth if self.budget > 1 else 0

    def limited(self, max_nodes: int, max_depth: int, max_expansions: int = MAX_EXPANSIONS) -> BestFirst:
        """The same plan within limits of its nodes, its levels, and the nodes that the draft model runs on.

        At least one level remains.
        """
        budget, width = min(self.budget, max_nodes), min(self.width, max_nodes)
        max_levels = max(1, max_expansions // min(width, budget))
        return self._replace(budget=budget, width=width, depth=min(self.depth, max_nodes, max_depth, max_levels))


@dataclass(frozen=True, slots=True)
class StaticShape:
    """A fixed tree shape (Sequoia, arXiv 2402.12374, section 3.1), grown one level for each draft step."""

    parents: tuple[int, ...]  # parents of node 1 and on; level by level, siblings by rank

    @classmethod
    def chains(cls, num: int, length: int) -> StaticShape:
        """Independent paths below the root: one is classic speculative decoding, several are SpecInfer's."""
        return cls(tuple(max(0, node - num) for node in range(1, num * length + 1)))

    @property
    def budget(self) -> int:
        """Nodes, the root included."""
        return len(self.parents) + 1

    @property
    def max_expansions(self) -> int:
        """Upper bound on the nodes that the draft model runs on."""
        return len(set(self.parents))

    @property
    def depth(self) -> int:
        """Number of levels below the root."""
        return max(self.depths())

    def limited(self, max_nodes: int, max_depth: int, max_expansions: int = MAX_EXPANSIONS) -> StaticShape:
        """The same shape, cut after `max_nodes` nodes and `max_depth` levels; expansions are not limited."""
        del max_expansions  # a request has chosen the shape, and a worker refuses one that needs too many
        return StaticShape(self.parents[: min(max_nodes, sum(level <= max_depth for level in self.depths())) - 1])

    def depths(self) -> list[int]:
        """The depth of each node, 0 for the root."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths


Growth = BestFirst | StaticShape


@dataclass(frozen=True, slots=True)
class TreePlan:
    """How one round's tree is to be grown and verified."""

    growth: Growth
    scheme: Scheme = Scheme.TARGET
    guess: Guess = Guess.SAMPLE  # requests cannot change it; benchmarks do

    def in_time(self, seconds: float) -> TreePlan:
        """The same plan, with best-first growth limited to `seconds` unless it has a shorter limit."""
        growth = self.growth
        if not isinstance(growth, BestFirst) or 0 < growth.seconds <= seconds:
            return self
        return replace(self, growth=growth._replace(seconds=seconds))


NO_TREE = TreePlan(BestFirst(budget=1, width=1, depth=1))  # plain decoding


def require_growth(name: str, growth: Growth, max_nodes: int) -> None:
    """Raises InvalidRequest naming a field that allows no tree of at most `max_nodes` nodes."""
    match growth:
        case BestFirst():
            for field, value in growth._asdict().items():
                is_size = isinstance(value, int)
                if is_size and not 1 <= value <= max_nodes:
                    raise InvalidRequest(f"{name}.{field}", f"must be 1 to {max_nodes}", value)
                if not is_size and not 0 <= value < math.inf:
                    raise InvalidRequest(f"{name}.{field}", "must be 0 (off) or more", value)
        case StaticShape(parents):
            for index, parent in enumerate(parents):
                lowest = parents[index - 1] if index else 0
                if not lowest <= parent <= index:
                    raise InvalidRequest(
                        f"{name}.parents[{index}]",
                        f"must be {lowest} to {index}, as parents ascend level by level",
                        parent,
                    )
    if growth.budget > max_nodes:
        raise InvalidRequest(name, f"must have at most {max_nodes} nodes", growth.budget)
