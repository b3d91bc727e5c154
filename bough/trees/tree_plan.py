"""How a round's tree is to be grown and verified, as plain values. Knows no models and no trees."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from bough.errors import InvalidRequest

MAX_EXPANSIONS = 2048  # nodes that a draft's model is run on for one tree: each takes a row of the session's slot


class Scheme(Enum):
    """How the target decides which guesses to keep. All are exact; they differ in what a draft must send along."""

    TARGET = "target"  # SpecExec: the target draws, guesses that it has drawn are kept
    WITHOUT_REPLACEMENT = "without-replacement"  # Sequoia: children were sampled without replacement
    MULTI_ROUND = "multi-round"  # SpecInfer: children were sampled independently
    TRAVERSAL = "traversal"  # whole paths (arXiv 2505.12398): children were sampled without replacement

    @property
    def is_without_replacement(self) -> bool:
        """Whether children are a sample without replacement."""
        return self in (Scheme.WITHOUT_REPLACEMENT, Scheme.TRAVERSAL)


class Guess(Enum):
    """What a draft takes for likely below a node, where the target draws for itself (Scheme.TARGET)."""

    SAMPLE = "sample"  # the token that the target will draw, given the random numbers that both know
    DISTRIBUTION = "distribution"  # what is likely before they are known, as in the papers


class BestFirst(NamedTuple):
    """The most probable paths first (SpecExec, arXiv 2406.02532, section 4.2), while they are worth their price.

    With lambda tokens per second, a node costs lambda times the seconds that it adds to a sweep, a step lambda times
    its own (docs/design.md, rule 5).
    """

    budget: int  # nodes, the root included
    width: int  # nodes expanded in one draft step
    depth: int  # levels below the root
    node_price: float = 0.0  # expected tokens: nodes whose path is less probable are left out
    step_price: float = 0.0  # expected tokens: a step that cannot add as many is not made
    seconds: float = 0.0  # since the call arrived: what has grown by then is the tree; 0 is no limit

    @property
    def max_expansions(self) -> int:
        """Most nodes that the draft model is run on."""
        return min(self.width, self.budget) * self.depth if self.budget > 1 else 0

    def within(self, max_nodes: int) -> BestFirst:
        """The same, no larger than this."""
        budget, width, depth = (min(size, max_nodes) for size in (self.budget, self.width, self.depth))
        return self._replace(budget=budget, width=width, depth=depth)

    def no_deeper(self, depth: int) -> BestFirst:
        """The same, with so many levels at most."""
        return self._replace(depth=min(self.depth, depth))


@dataclass(frozen=True, slots=True)
class StaticShape:
    """A shape fixed beforehand (Sequoia, arXiv 2402.12374, section 3.1), a level in one draft step."""

    parents: tuple[int, ...]  # of node 1 and on; level by level, siblings by rank

    @property
    def budget(self) -> int:
        """Nodes, the root included."""
        return len(self.parents) + 1

    @property
    def max_expansions(self) -> int:
        """Most nodes that the draft model is run on."""
        return len(set(self.parents))

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return max(self.depths())

    def within(self, max_nodes: int) -> StaticShape:
        """The same, without its last nodes where they are too many."""
        return StaticShape(self.parents[: max_nodes - 1])

    def no_deeper(self, depth: int) -> StaticShape:
        """The same, with so many levels at most."""
        return self.within(sum(level <= depth for level in self.depths()))

    def depths(self) -> list[int]:
        """Levels below the root of every node, the root included."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths


class Chains(NamedTuple):
    """Paths grown independently of one another: one is classic speculative decoding, k are SpecInfer's."""

    num: int
    length: int

    @property
    def budget(self) -> int:
        """Nodes at most, the root included."""
        return self.num * self.length + 1

    @property
    def max_expansions(self) -> int:
        """Most nodes that the draft model is run on."""
        return self.num * (self.length - 1) + 1

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return self.length

    def within(self, max_nodes: int) -> Chains:
        """The same, with fewer chains where they are too many, and at last shorter ones."""
        length = min(self.length, max_nodes - 1)
        return Chains(min(self.num, (max_nodes - 1) // length) if length else 0, length)

    def no_deeper(self, depth: int) -> Chains:
        """The same, with so many levels at most."""
        return self._replace(length=min(self.length, depth))


Growth = BestFirst | StaticShape | Chains


@dataclass(frozen=True, slots=True)
class TreePlan:
    """How one round's tree is to be grown and verified."""

    growth: Growth
    scheme: Scheme = Scheme.TARGET
    guess: Guess = Guess.SAMPLE

    def within(self, max_nodes: int) -> TreePlan:
        """The same, for a tree of at most so many nodes."""
        return replace(self, growth=self.growth.within(max_nodes))

    def no_deeper(self, depth: int) -> TreePlan:
        """The same, with so many levels at most."""
        return replace(self, growth=self.growth.no_deeper(depth))

    def in_time(self, seconds: float) -> TreePlan:
        """The same, but of a best-first tree what has grown after so many seconds, if it is not to end before."""
        growth = self.growth
        if not isinstance(growth, BestFirst) or 0 < growth.seconds <= seconds:
            return self
        return replace(self, growth=growth._replace(seconds=seconds))


NO_TREE = TreePlan(BestFirst(budget=1, width=1, depth=1))  # plain decoding


def require_growth(name: str, growth: Growth, max_nodes: int) -> None:
    """Raises InvalidRequest naming what no tree of at most `max_nodes` nodes can be grown by."""
    match growth:
        case BestFirst() | Chains():
            for field, value in growth._asdict().items():
                is_size = isinstance(value, int)
                if is_size and not 1 <= value <= max_nodes:
                    raise InvalidRequest(f"{name}.{field}: {value}; 1 to {max_nodes} would do")
                if not is_size and not 0 <= value < math.inf:
                    raise InvalidRequest(f"{name}.{field}: {value}; 0 (off) or more would do")
        case StaticShape(parents):
            for index, parent in enumerate(parents):
                if not (parents[index - 1] if index else 0) <= parent <= index:
                    raise InvalidRequest(
                        f"{name}.parents[{index}]: {parent}; level by level a parent comes before its children, so "
                        f"{parents[index - 1] if index else 0} to {index} would do"
                    )
    if growth.budget > max_nodes:
        raise InvalidRequest(f"{name}: {growth.budget} nodes; at most {max_nodes} are verified at once")
