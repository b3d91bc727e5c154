"""Acceptance distributions of simulated drafts, read from JSON: by rank, by depth, drifting, or hostile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from bough.simulation.reading import Count, as_written, read, refusal
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
MOST_RANKS = 256  # fewer than the words, as the guesses for a position are distinct
Rows = tuple[tuple[float, ...], ...]  # [depth][rank]; the last row also applies to all deeper nodes
NO_ROWS: Rows = ()


def _probs(name: str, value: Any) -> Rows:
    """Read the name of a published vector, a list by rank, or a list of lists by depth."""
    if isinstance(value, str):
        if value not in PUBLISHED:
            raise refusal(name, value, f"a list of probabilities by rank, or one of {', '.join(PUBLISHED)}")
        return (PUBLISHED[value],)
    rows = acceptance_from(name, value)
    if rows.shape[1] > MOST_RANKS:
        raise refusal(name, rows.shape[1], f"at most {MOST_RANKS} probabilities")
    return tuple(tuple(row) for row in rows.tolist())


@dataclass(frozen=True, slots=True)
class AcceptanceModel:
    """The probability that the child of each rank is the target's token, its variance, and the draft's calibration.

    `spread` is the variation among positions: the standard deviation of the first rank's probability, as a share of the
    largest possible one. At 0 all positions are equal; near 1 each is either certain or as flat as the vector allows.
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


VECTORS = {"by_rank": ("vector",), "by_depth": ("vectors",), "drifting": ("first", "last"), "hostile": ()}  # by kind


@as_written
@dataclass(frozen=True, slots=True)
class _Numbers:
    """The fields other than vectors."""

    over_positions: Count = 1
    spread: Annotated[float, Field(ge=0, le=0.99)] = 0.0
    overconfidence: Annotated[float, Field(gt=0, le=16)] = 1.0


def read_acceptance_model(value: Any) -> AcceptanceModel:
    """Read a JSON object whose `kind` determines its other fields.

    Raises:
        ConfigError: names the invalid field.
    """
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in VECTORS:
        raise refusal("acceptance.kind", kind, f"one of {', '.join(VECTORS)}")
    if (kind == "drifting") != ("over_positions" in value):
        raise refusal("acceptance.over_positions", value.get("over_positions"), "given only if kind is drifting")
    own = {name: given for name, given in value.items() if name not in ("kind", *VECTORS[kind])}
    numbers = read(_Numbers, "acceptance", own)
    rows = [_probs(f"acceptance.{name}", value.get(name)) for name in VECTORS[kind]] or [((0.0,) * HOSTILE_RANKS,)]
    if kind == "by_rank" and len(rows[0]) != 1:
        raise refusal("acceptance.vector", value["vector"], "one list of probabilities by rank; by_depth has several")
    first, last = rows[0], rows[1] if len(rows) > 1 else NO_ROWS
    return AcceptanceModel(kind, first, last, numbers.over_positions, numbers.spread, numbers.overconfidence)
