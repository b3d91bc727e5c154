"""What a sweep will cost, before there is one, and what more memory would buy. Sizes and speeds in, seconds out.

A sweep takes as long as the slower of two things that happen at once: the streamed layers cross the link, and every
chunk of rows is multiplied with every layer. The first does not depend on the tree, but for experts that are read when
rows choose them; the second grows with it, by as many rows at a time as are padded to. Where the second passes the
first is the knee: up to there, nodes cost no more than what they read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bough.sizing.flops import Work
from bough.sizing.placement import Budgets, Placement, Tier
from bough.sizing.row_counts import RowCounts

GIGABYTE = 1000**3
MOST_TOKENS = 1 << 20  # of a sweep: no knee is looked for beyond
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
class SweepModel:
    """Predicted seconds of a sweep, by its number of tokens."""

    rows: RowCounts  # of a chunk
    work: Work
    speeds: Speeds
    link_seconds: float  # of what crosses the link in every sweep
    expert_seconds: float = 0.0  # of what crosses it besides if rows choose all experts that are not in memory
    disk_seconds: float = 0.0  # of a disk behind that link, which reads at the same time

    def chunk_seconds(self, num_tokens: int) -> float:
        """Of the products of a chunk, padding included, and what is written out for them."""
        seconds = step_seconds(self.work, self.rows.padded(num_tokens), num_tokens, self.speeds)
        unpack = self.speeds.unpack
        return seconds + (self.work.bytes_unpacked(num_tokens) / unpack.per_second if unpack else 0.0)

    def compute_seconds(self, num_tokens: int) -> float:
        """One chunk after another, and before them, beside the link, what is written out once a sweep."""
        whole, rest = divmod(num_tokens, self.rows.most)
        seconds = whole * self.chunk_seconds(self.rows.most) + (self.chunk_seconds(rest) if rest else 0.0)
        return seconds + (self.work.bytes_unpacked_once / self.speeds.unpack.per_second if self.speeds.unpack else 0.0)

    def link_seconds_of(self, num_tokens: int) -> float:
        """Of the link: what every sweep reads, and the experts that its rows choose."""
        share = self.work.experts.share(num_tokens) if self.work.experts else 0.0
        return max(self.disk_seconds, self.link_seconds + share * self.expert_seconds)

    def seconds(self, num_tokens: int) -> float:
        """Link and compute go on at the same time."""
        return max(self.link_seconds_of(num_tokens), self.compute_seconds(num_tokens))

    @property
    def knee(self) -> int:
        """The most tokens whose computing costs no more than the link does; 0 where even the fewest cost more."""
        step, longest = self.rows.step, self.link_seconds_of(MOST_TOKENS)
        most = step * bisect_right(
            range(step, MOST_TOKENS, step), longest, key=lambda num_tokens: self.compute_seconds(num_tokens)
        )
        while most and self.compute_seconds(most) > self.link_seconds_of(most):
            most -= step
        return most


def step_seconds(work: Work, num_rows: int, num_tokens: int, speeds: Speeds) -> float:
    """One pass of so many rows, the tokens among them, through a model whose weights have arrived.

    Arithmetic, or memory where it is slower.
    """
    compute = work.flops(num_rows, num_tokens) / speeds.compute.per_second
    return max(compute, work.bytes_read(num_tokens) / speeds.memory.per_second) if speeds.memory else compute


def sweep_model(placement: Placement, work: Work, rows: RowCounts, speeds: Speeds) -> SweepModel:
    """Of a model placed so, on a machine of these speeds.

    What is on disk crosses the disk's link and then, where there is one, the host's.
    """
    disk_bytes, expert_bytes = placement.num_bytes(Tier.DISK), max(0, placement.expert_bytes - placement.fixed.experts)
    assert speeds.disk or not disk_bytes, "whoever places layers on disk knows how fast it is"
    disk_seconds = disk_bytes / speeds.disk.per_second if speeds.disk else 0.0
    if speeds.host_link is None:
        expert_seconds = expert_bytes / speeds.disk.per_second if speeds.disk else 0.0
        return SweepModel(rows, work, speeds, disk_seconds, expert_seconds)
    per_second = speeds.host_link.per_second
    link_seconds = (placement.num_bytes(Tier.HOST) + disk_bytes) / per_second
    return SweepModel(rows, work, speeds, link_seconds, expert_bytes / per_second, disk_seconds)


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
    link_bytes: int  # that then cross the link in every sweep, at most
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
