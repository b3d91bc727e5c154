"""What a sweep will cost, before there is one, and what more memory would buy. Sizes and speeds in, seconds out.

A sweep takes as long as the slower of two things that happen at once: the streamed layers cross the link, and every
chunk of rows is multiplied with every layer. The first does not depend on the tree; the second grows with it, by as
many rows at a time as are padded to. Where the second passes the first is the knee: up to there, nodes are free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bough.placement import Budgets, Placement, Tier
from bough.row_counts import RowCounts

GIGABYTE = 1000**3
MORE_GIGABYTES = (1, 4)  # that the price list offers


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes or operations per second, and how they are known."""

    per_second: float
    origin: str  # "measured: ..." or the flag that says so


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of a machine. None is not known, and left out of the reckoning."""

    compute: Speed  # floating-point operations of matrix products
    disk: Speed | None = None  # bytes read from disk
    host_link: Speed | None = None  # bytes from the host's memory to the accelerator's, where they are not the same
    memory: Speed | None = None  # bytes between the accelerator and its own memory
    unpack: Speed | None = None  # bytes of weights written out from 4 or 8 bits


@dataclass(frozen=True, slots=True)
class Work:
    """What a pass over a whole model computes. Matrix products only: attention, norms and drawing come on top."""

    token_flops: float  # of one row, in all layers and the output head
    weight_bytes: int  # that every chunk of rows reads from the accelerator's memory
    unpacked_bytes: int = 0  # of these, what each sweep first writes out from 4 or 8 bits
    expert_share: float = 1.0  # of a layer's experts, what a row chooses


@dataclass(frozen=True, slots=True)
class Chosen:
    """Experts that are read when rows choose them, each with the same chance and for itself; real rows are alike."""

    seconds: float  # of the link, if all that are not in memory are chosen
    share: float  # of a layer's experts that a row chooses

    def seconds_of(self, num_tokens: int) -> float:
        """Of the link, with so many rows."""
        return self.seconds * (1 - (1 - self.share) ** num_tokens)


@dataclass(frozen=True, slots=True)
class SweepModel:
    """Predicted seconds of a sweep, by its number of tokens."""

    rows: RowCounts  # of a chunk
    link_seconds: float
    row_seconds: float  # of arithmetic
    read_seconds: float  # of all weights from memory, which every chunk takes at least
    unpack_seconds: float  # once a sweep, beside the link and before the products
    chosen: Chosen | None = None  # what crosses the link besides, where rows choose it

    def chunk_seconds(self, num_rows: int) -> float:
        """Of the products of a chunk, padding included."""
        return max(self.read_seconds, num_rows * self.row_seconds)

    def compute_seconds(self, num_tokens: int) -> float:
        """One chunk after another."""
        whole, rest = divmod(self.rows.padded(num_tokens), self.rows.most)
        seconds = self.unpack_seconds + whole * self.chunk_seconds(self.rows.most)
        return seconds + self.chunk_seconds(rest) if rest else seconds

    def link_seconds_of(self, num_tokens: int) -> float:
        """Of the link: what every sweep reads, and the experts that its rows choose."""
        return self.link_seconds + (self.chosen.seconds_of(num_tokens) if self.chosen else 0.0)

    def seconds(self, num_tokens: int) -> float:
        """Link and compute go on at the same time."""
        return max(self.link_seconds_of(num_tokens), self.compute_seconds(num_tokens))

    @property
    def knee(self) -> int:
        """The most tokens whose computing costs no more than the link does; 0 where even the fewest cost more."""
        most = self._most_within(self.link_seconds + (self.chosen.seconds if self.chosen else 0.0))
        while self.chosen and most > 0 and self.compute_seconds(most) > self.link_seconds_of(most):
            most -= self.rows.step
        return max(0, most)

    def _most_within(self, seconds: float) -> int:
        """Tokens that are computed within so long."""
        left = seconds - self.unpack_seconds
        whole = max(0, math.floor(left / self.chunk_seconds(self.rows.most)))
        left -= whole * self.chunk_seconds(self.rows.most)
        steps = math.floor(left / self.row_seconds / self.rows.step) if left >= self.read_seconds else 0
        return whole * self.rows.most + min(steps * self.rows.step, self.rows.most - self.rows.step)


def step_seconds(work: Work, rows: int, speeds: Speeds) -> float:
    """One pass of `rows` rows through a model whose weights have arrived: arithmetic, or memory where it is slower."""
    compute = rows * work.token_flops / speeds.compute.per_second
    return max(compute, work.weight_bytes / speeds.memory.per_second) if speeds.memory else compute


def link_seconds(placement: Placement, speeds: Speeds) -> float:
    """What is on disk crosses the disk's link and then, where there is one, the host's; both run at once."""
    seconds = 0.0
    if disk_bytes := placement.num_bytes(Tier.DISK):
        assert speeds.disk is not None, "whoever places layers on disk knows how fast it is"
        seconds = disk_bytes / speeds.disk.per_second
    if speeds.host_link is not None:
        seconds = max(seconds, placement.link_bytes / speeds.host_link.per_second)
    return seconds


def sweep_model(placement: Placement, work: Work, rows: RowCounts, speeds: Speeds) -> SweepModel:
    """Of a model placed so, on a machine of these speeds."""
    missing = max(0, placement.expert_bytes - placement.fixed.experts)
    return SweepModel(
        rows,
        link_seconds(placement, speeds),
        step_seconds(work, 1, replace(speeds, memory=None)),
        step_seconds(work, 0, speeds),
        work.unpacked_bytes / speeds.unpack.per_second if speeds.unpack else 0.0,
        Chosen(missing / speeds.disk.per_second, work.expert_share) if missing and speeds.disk else None,
    )


@dataclass(frozen=True, slots=True)
class Rate:
    """What a number of tokens per round comes to."""

    tokens_per_round: float
    draft_seconds: float
    sweep_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """The draft grows its tree, then the target sweeps: nothing is grown ahead."""
        return self.tokens_per_round / (self.draft_seconds + self.sweep_seconds)


def rate(model: SweepModel, tokens_per_round: float, num_nodes: int, draft_seconds: float) -> Rate:
    """Of rounds with trees of `num_nodes`. One token a round is plain decoding, without tree or draft."""
    if tokens_per_round <= 1:
        return Rate(tokens_per_round, 0.0, model.seconds(1))
    return Rate(tokens_per_round, draft_seconds, model.seconds(num_nodes))


@dataclass(frozen=True, slots=True)
class Purchase:
    """More memory, and what it buys."""

    kind: str  # "device" or "host"
    added_bytes: int
    link_bytes: int  # that then cross the link in every sweep
    sweep_seconds: float
    saved_seconds: float  # of every sweep


def purchases(
    budgets: Budgets,
    kinds: Sequence[str],
    place: Callable[[Budgets], Placement],
    seconds: Callable[[Placement], float],
) -> list[Purchase]:
    """The price list: `seconds` of a sweep once the layers are placed anew in more memory of each kind."""
    before = seconds(place(budgets))
    bought = []
    for kind in kinds:
        for added in (gigabytes * GIGABYTE for gigabytes in MORE_GIGABYTES):
            more = (
                replace(budgets, device=budgets.device + added)
                if kind == "device"
                else replace(budgets, host=budgets.host + added)
            )
            placement = place(more)
            after = seconds(placement)
            bought.append(Purchase(kind, added, placement.link_bytes, after, before - after))
    return bought
