"""How a round's tree is to be grown and verified, as plain values. Knows no models and no trees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from bough.errors import InvalidRequest


class Scheme(Enum):
    """How the target decides which guesses to keep. All are exact; they differ in what a draft must send along."""

    TARGET = "target"  # SpecExec: the target draws, guesses that it has drawn are kept
    WITHOUT_REPLACEMENT = "without-replacement"  # Sequoia: children were sampled without replacement
    MULTI_ROUND = "multi-round"  # SpecInfer: children were sampled independently


class Guess(Enum):
    """What a draft takes for likely below a node, where the target draws for itself (Scheme.TARGET)."""

    SAMPLE = "sample"  # the token that the target will draw, given the random numbers that both know
    DISTRIBUTION = "distribution"  # what is likely before they are known, as in the papers


class BestFirst(NamedTuple):
    """The most probable paths first (SpecExec, arXiv 2406.02532, section 4.2)."""

    budget: int  # nodes, the root included
    width: int  # nodes expanded in one draft step
    depth: int  # levels below the root

    @property
    def max_expansions(self) -> int:
        """Most nodes that the draft model is run on."""
        return self.width * self.depth if self.budget > 1 else 0

    def within(self, max_nodes: int) -> BestFirst:
        """The same, no larger than this."""
        return BestFirst(*(min(size, max_nodes) for size in self))


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

    def within(self, max_nodes: int) -> StaticShape:
        """The same, without its last nodes where they are too many."""
        return StaticShape(self.parents[: max_nodes - 1])

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

    def within(self, max_nodes: int) -> Chains:
        """The same, with fewer chains where they are too many, and at last shorter ones."""
        length = min(self.length, max_nodes - 1)
        return Chains(min(self.num, (max_nodes - 1) // length) if length else 0, length)


Growth = BestFirst | StaticShape | Chains


@dataclass(frozen=True, slots=True)
class TreePlan:
    """How one round's tree is to be grown and verified."""

    growth: Growth
    scheme: Scheme = Scheme.TARGET
    guess: Guess = Guess.SAMPLE

    def within(self, max_nodes: int) -> TreePlan:
        """The same, for a tree of at most so many nodes."""
        return self if self.growth.budget <= max_nodes else replace(self, growth=self.growth.within(max_nodes))


NO_TREE = TreePlan(BestFirst(budget=1, width=1, depth=1))  # plain decoding


def require_growth(name: str, growth: Growth, max_nodes: int) -> None:
    """Raises InvalidRequest naming what no tree of at most `max_nodes` nodes can be grown by."""
    match growth:
        case BestFirst() | Chains():
            for field, value in growth._asdict().items():
                if not 1 <= value <= max_nodes:
                    raise InvalidRequest(f"{name}.{field}: {value}; 1 to {max_nodes} would do")
        case StaticShape(parents):
            for index, parent in enumerate(parents):
                if not (parents[index - 1] if index else 0) <= parent <= index:
                    raise InvalidRequest(
                        f"{name}.parents[{index}]: {parent}; level by level a parent comes before its children, so "
                        f"{parents[index - 1] if index else 0} to {index} would do"
                    )
    if growth.budget > max_nodes:
        raise InvalidRequest(f"{name}: {growth.budget} nodes; at most {max_nodes} are verified at once")
