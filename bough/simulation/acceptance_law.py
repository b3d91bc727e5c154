"""Acceptance distributions of simulated drafts, read from JSON: by rank, by depth, drifting, or hostile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bough.errors import ConfigError
from bough.simulation.reading import choice, count, described, number, read_part, refusal
from bough.trees.acceptance import Acceptance, acceptance_from

# Acceptance vectors by rank, from Sequoia (arXiv 2402.12374) and its repository.
COUNTS_667 = (423, 72, 38, 15, 13, 10, 3, 2, 8, 3, 5, 3, 4, 2, 1, 2, 1, 2, 0, 2, 2, 2, 0, 1, 0, 1, 0, 0, 0, 1, 1, 1)
LLAMA_3_CNN = (
    0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026, 0.0025, 0.0021, 0.0016, 0.0014,
    0.0010, 0.0010, 0.0010, 0.0007, 0.0007, 0.0006, 0.0007, 0.0006, 0.0004, 0.0004, 0.0005, 0.0006, 0.0004, 0.0003,
    0.0002, 0.0004, 0.0001,
)  # fmt: skip
PUBLISHED = {
    "sequoia-measured-667": tuple(number / 667 for number in COUNTS_667),
    "llama-3-70b-8b-cnn-dailymail": LLAMA_3_CNN,
}
HOSTILE_RANKS = 16
Rows = tuple[tuple[float, ...], ...]  # [depth][rank]; the last row also applies to all deeper nodes
NO_ROWS: Rows = ()


def _probs(name: str, value: Any) -> Rows:
    """Read the name of a published vector, a list by rank, or a list of lists by depth."""
    if isinstance(value, str):
        if value not in PUBLISHED:
            raise refusal(name, value, f"a list of probabilities by rank, or one of {', '.join(PUBLISHED)}")
        return (PUBLISHED[value],)
    return tuple(tuple(row) for row in acceptance_from(name, value).tolist())


def _by_rank(name: str, value: Any) -> Rows:
    rows = _probs(name, value)
    if len(rows) != 1:
        raise refusal(name, value, "one list of probabilities by rank; kind by_depth has several")
    return rows


@dataclass(frozen=True, slots=True)
class AcceptanceLaw:
    """The probability that the child of each rank is the target's token, its variance, and the draft's calibration.

    `spread` is the variation among positions: the standard deviation of the first rank's probability, as a share of the
    largest possible one. At 0 all positions are alike; near 1 each is either certain or as flat as the vector allows.
    Means over positions are always `rows`. The draft's stated probabilities are the true ones to the power
    `overconfidence`, normalised.
    """

    kind: str
    rows: Rows = NO_ROWS
    last_rows: Rows = NO_ROWS  # drifting: rows at position `over_positions` and on
    over_positions: int = 1
    spread: float = 0.0
    overconfidence: float = 1.0

    @property
    def is_hostile(self) -> bool:
        """Whether the draft states certainty and is always wrong."""
        return self.kind == "hostile"

    def acceptance(self, position: int = 0) -> Acceptance:
        """(num_depths, num_ranks): mean acceptance by depth and rank; `position` matters only if it drifts."""
        first = np.array(self.rows)
        if not self.last_rows:
            return first
        first, last = same_shape(first, np.array(self.last_rows))
        share = min(1.0, max(0.0, position / self.over_positions))
        mixed: Acceptance = (1 - share) * first + share * last
        return mixed


def same_shape(first: Acceptance, last: Acceptance) -> tuple[Acceptance, Acceptance]:
    """Pad both to the same depths (by repeating the last) and ranks (by zeros)."""
    num_depths, num_ranks = (max(sizes) for sizes in zip(first.shape, last.shape, strict=True))

    def grown(rows: Acceptance) -> Acceptance:
        more_depths = np.repeat(rows[-1:], num_depths - len(rows), axis=0)
        return np.pad(np.concatenate((rows, more_depths)), ((0, 0), (0, num_ranks - rows.shape[1])))

    return grown(first), grown(last)


@dataclass(frozen=True, slots=True)
class _ByRank:
    kind: str = described(choice("by_rank"))
    vector: Rows = described(_by_rank)
    spread: float = described(number(0, 0.99), 0.0)
    overconfidence: float = described(number(0, 16, above=True), 1.0)


@dataclass(frozen=True, slots=True)
class _ByDepth:
    kind: str = described(choice("by_depth"))
    vectors: Rows = described(_probs)
    spread: float = described(number(0, 0.99), 0.0)
    overconfidence: float = described(number(0, 16, above=True), 1.0)


@dataclass(frozen=True, slots=True)
class _Drifting:
    kind: str = described(choice("drifting"))
    first: Rows = described(_probs)
    last: Rows = described(_probs)
    over_positions: int = described(count(1))
    spread: float = described(number(0, 0.99), 0.0)
    overconfidence: float = described(number(0, 16, above=True), 1.0)


@dataclass(frozen=True, slots=True)
class _Hostile:
    kind: str = described(choice("hostile"))


def read_acceptance_law(name: str, value: Any) -> AcceptanceLaw:
    """Read a JSON object whose `kind` determines its other fields.

    Raises:
        ConfigError: names the invalid field.
    """
    if not isinstance(value, dict):
        raise refusal(name, value, "an object with a kind: by_rank, by_depth, drifting or hostile")
    match value.get("kind"):
        case "by_rank":
            ranked = read_part(_ByRank, name, value)
            return AcceptanceLaw("by_rank", ranked.vector, NO_ROWS, 1, ranked.spread, ranked.overconfidence)
        case "by_depth":
            deep = read_part(_ByDepth, name, value)
            return AcceptanceLaw("by_depth", deep.vectors, NO_ROWS, 1, deep.spread, deep.overconfidence)
        case "drifting":
            drift = read_part(_Drifting, name, value)
            positions = drift.over_positions
            return AcceptanceLaw("drifting", drift.first, drift.last, positions, drift.spread, drift.overconfidence)
        case "hostile":
            read_part(_Hostile, name, value)
            return AcceptanceLaw("hostile", ((0.0,) * HOSTILE_RANKS,))
        case None:
            raise ConfigError(f"{name}.kind: missing; must be by_rank, by_depth, drifting or hostile")
        case other:
            raise refusal(f"{name}.kind", other, "by_rank, by_depth, drifting or hostile")
