"""Predicted seconds of a sweep from sizes and speeds, and the value of more memory.

A sweep takes the maximum of two concurrent activities: streamed layers cross the link, and each chunk of rows is
multiplied with each layer. Hidden states also cross to other accelerators that have layers, and back. Link time
does not depend on the tree, except for experts read on demand; compute time grows with the padded rows. The knee is the
number of rows where compute time exceeds link time: below it, nodes are nearly free.

What a GPU does is assumed, by the constants below, until it is measured.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bough.sizing.distinct_experts import distinct_share
from bough.sizing.placement import Budgets, Placement, Tier
from bough.sizing.row_counts import RowCounts

GIGABYTE = 1000**3
MOST_TOKENS = 1 << 20  # upper limit of the search for the knee
HOP_SECONDS = 30e-6  # latency of a crossing between accelerators; assumed
MORE_GIGABYTES = (1, 4)  # amounts of added memory in the price list

# Assumed of bough's own products on a GPU; others' Triton kernels reach about as much with few rows.
PEAK_SHARE = 0.55  # of the dense 16-bit peak of tensor cores that add in float32
MEMORY_SHARE = 0.5  # of the bandwidth of its memory
LAYER_SECONDS = 0.25e-3  # of all else in a layer: attention to 1,000 tokens, norms, launches
TILES = (16, 32, 64, 128)  # rows that one program multiplies


@dataclass(frozen=True, slots=True)
class ExpertWork:
    """Work of all layers' experts if rows choose experts uniformly and independently; real choices overlap more."""

    token_flops: float  # of the experts that one row chooses
    weight_bytes: int  # of all experts
    unpacked_bytes: int  # of all experts, when unpacked from few bits
    num_experts: int  # in a layer
    num_chosen: int  # experts chosen by each row
    least_rows: int  # fewest rows that an expert's products cost

    def share(self, num_tokens: int) -> float:
        """The expected share of a layer's experts that `num_tokens` rows choose together."""
        return float(distinct_share(self.num_chosen / self.num_experts, num_tokens))

    def flops(self, num_tokens: int) -> float:
        """A lower bound: experts chosen by few rows cost `least_rows` rows, and further padding is not counted."""
        num_experts = self.share(num_tokens) * self.num_experts
        if not num_experts:
            return 0.0
        times = max(1.0, num_tokens * self.num_chosen / num_experts / self.least_rows)
        return self.token_flops / self.num_chosen * num_experts * times * self.least_rows


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a whole model; experts that only some rows choose are counted separately."""

    token_flops: float  # of one row, in all layers and the output head
    weight_bytes: int  # read from the accelerator's memory by each chunk of rows
    unpacked_bytes: int = 0  # of weights that are unpacked from 4 or 8 bits, once in a sweep
    experts: ExpertWork | None = None
    other_seconds: float = 0.0  # of a sweep, besides products; 0 if not known

    @property
    def flops_per_token(self) -> float:
        """Operations of one row, its chosen experts included."""
        return self.token_flops + (self.experts.token_flops if self.experts else 0.0)

    def flops(self, num_rows: int, num_tokens: int) -> float:
        """Operations of a chunk of `num_rows` rows, of which `num_tokens` are tokens and the rest padding."""
        return num_rows * self.token_flops + (self.experts.flops(num_tokens) if self.experts else 0.0)

    def bytes_read(self, num_tokens: int) -> float:
        """Bytes that a chunk with `num_tokens` tokens reads from memory."""
        return self.weight_bytes + (self.experts.share(num_tokens) * self.experts.weight_bytes if self.experts else 0.0)

    def bytes_unpacked(self, num_tokens: int) -> float:
        """Bytes unpacked for a sweep, experts only if its tokens choose them."""
        return self.unpacked_bytes + (
            self.experts.share(num_tokens) * self.experts.unpacked_bytes if self.experts else 0
        )


@dataclass(frozen=True, slots=True)
class TiledWork(Work):
    """Work of a model on a GPU, where rows are multiplied in tiles of equal size.

    Tiles that need the same weights follow one another, so a chunk reads weights once.
    """

    def flops(self, num_rows: int, num_tokens: int) -> float:
        """As of `Work`, of tiles instead of `num_rows`."""
        return Work.flops(self, tiled(num_tokens), num_tokens)


def tiled(num_tokens: int) -> int:
    """Rows of all tiles of `num_tokens` rows, which have the smallest size that holds them or else the largest."""
    size = next((size for size in TILES if num_tokens <= size), TILES[-1])
    return -(-num_tokens // size) * size


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes or operations per second, and their origin."""

    per_second: float
    origin: str  # "measured: ...", or the flag that sets it

    def reached(self, share: float) -> Speed:
        """The share of this speed that bough is assumed to reach."""
        return Speed(share * self.per_second, f"assumed: {100 * share:.0f} % of that {self.origin}")


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of a machine; None is unknown, and its time is ignored."""

    compute: Speed  # floating-point operations of matrix products
    disk: Speed | None = None  # bytes read from disk
    host_link: Speed | None = None  # bytes from host memory to an accelerator's own
    memory: Speed | None = None  # bytes between the accelerator and its own memory
    unpack: Speed | None = None  # bytes of weights unpacked from 4 or 8 bits
    crossing: Speed | None = None  # bytes from one accelerator to another


@dataclass(frozen=True, slots=True)
class SweepModel:
    """Predicted seconds of a sweep, by its number of tokens."""

    rows: RowCounts  # of a chunk
    work: Work
    speeds: Speeds
    link_seconds: float  # of the bytes that cross the link in every sweep
    expert_seconds: float = 0.0  # of all experts that are not in memory, which cross the link on demand
    disk_seconds: float = 0.0  # of a disk behind the link, read concurrently
    num_crossings: int = 0  # of hidden states, from one accelerator to another
    hidden_bytes: int = 0  # of a row's hidden state

    def chunk_seconds(self, num_tokens: int) -> float:
        """Seconds of a chunk's products, padding included."""
        return step_seconds(self.work, self.rows.padded(num_tokens), num_tokens, self.speeds)

    def compute_seconds(self, num_tokens: int) -> float:
        """Compute seconds of a sweep: unpacking of weights, all chunks, and hidden states crossing accelerators."""
        whole, rest = divmod(num_tokens, self.rows.most)
        seconds = whole * self.chunk_seconds(self.rows.most) + (self.chunk_seconds(rest) if rest else 0.0)
        unpacked, unpack = self.work.bytes_unpacked(num_tokens), self.speeds.unpack
        seconds += unpacked / unpack.per_second if unpack else 0.0
        return seconds + self.work.other_seconds + self.crossing_seconds(num_tokens)

    def crossing_seconds(self, num_tokens: int) -> float:
        """Seconds of a sweep in which its hidden states cross from one accelerator to another."""
        if self.speeds.crossing is None:
            return 0.0
        hop = self.rows.padded(num_tokens) * self.hidden_bytes / self.speeds.crossing.per_second
        return self.num_crossings * (HOP_SECONDS + hop)

    def link_seconds_of(self, num_tokens: int) -> float:
        """Link seconds of a sweep: streamed layers, and the experts that its rows choose."""
        share = self.work.experts.share(num_tokens) if self.work.experts else 0.0
        return max(self.disk_seconds, self.link_seconds + share * self.expert_seconds)

    def seconds(self, num_tokens: int) -> float:
        """Seconds of a sweep: the maximum of link and compute, which are concurrent."""
        return max(self.link_seconds_of(num_tokens), self.compute_seconds(num_tokens))

    @property
    def knee(self) -> int:
        """The most tokens whose compute time does not exceed the link's; 0 if there are none."""
        step, longest = self.rows.step, self.link_seconds_of(MOST_TOKENS)
        most = step * bisect_right(
            range(step, MOST_TOKENS, step), longest, key=lambda num_tokens: self.compute_seconds(num_tokens)
        )
        while most and self.compute_seconds(most) > self.link_seconds_of(most):
            most -= step
        return most


def step_seconds(work: Work, num_rows: int, num_tokens: int, speeds: Speeds) -> float:
    """Seconds of one pass of `num_rows` padded rows through a resident model: arithmetic or memory, if slower."""
    compute = work.flops(num_rows, num_tokens) / speeds.compute.per_second
    return max(compute, work.bytes_read(num_tokens) / speeds.memory.per_second) if speeds.memory else compute


def sweep_model(placement: Placement, work: Work, rows: RowCounts, speeds: Speeds, hidden_bytes: int = 0) -> SweepModel:
    """The cost model of a placed model on a machine with these speeds; a row's hidden state has `hidden_bytes`.

    Layers on disk are read from disk and then cross the host link, if there is one.
    """
    disk_bytes, expert_bytes = placement.num_bytes(Tier.DISK), max(0, placement.expert_bytes - placement.fixed.experts)
    assert speeds.disk or not disk_bytes, "layers on disk need a known disk speed"
    disk_seconds = disk_bytes / speeds.disk.per_second if speeds.disk else 0.0
    if speeds.host_link is None:
        expert_seconds = expert_bytes / speeds.disk.per_second if speeds.disk else 0.0
        return SweepModel(rows, work, speeds, disk_seconds, expert_seconds)
    per_second = speeds.host_link.per_second
    link_seconds = (placement.num_bytes(Tier.HOST) + disk_bytes) / per_second
    crossings = placement.num_crossings
    return SweepModel(
        rows, work, speeds, link_seconds, expert_bytes / per_second, disk_seconds, crossings, hidden_bytes
    )


@dataclass(frozen=True, slots=True)
class Rate:
    """The speed of decoding at a number of tokens per round."""

    tokens_per_round: float
    draft_seconds: float
    sweep_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second if drafting and sweeps alternate, without draft-ahead."""
        return self.tokens_per_round / (self.draft_seconds + self.sweep_seconds)


def rate(model: SweepModel, tokens_per_round: float, num_nodes: int, draft_seconds: float) -> Rate:
    """The rate of rounds with trees of `num_nodes`; one token a round is plain decoding, without a draft."""
    if tokens_per_round <= 1:
        return Rate(tokens_per_round, 0.0, model.seconds(1))
    return Rate(tokens_per_round, draft_seconds, model.seconds(num_nodes))


@dataclass(frozen=True, slots=True)
class MemoryPurchase:
    """An amount of added memory and the time it saves."""

    kind: str  # "device" or "host"
    added_bytes: int
    link_bytes: int  # most bytes that then cross the link in a sweep
    sweep_seconds: float
    saved_seconds: float  # in each sweep


def purchases(
    budgets: Budgets,
    kinds: Sequence[str],
    place: Callable[[Budgets], Placement],
    seconds: Callable[[Placement], float],
) -> list[MemoryPurchase]:
    """For each kind and amount of added memory, the sweep's `seconds` after `place` has placed the layers again."""
    before = seconds(place(budgets))
    bought = []
    for kind in kinds:
        for added in (gigabytes * GIGABYTE for gigabytes in MORE_GIGABYTES):
            placement = place(replace(budgets, **{kind: getattr(budgets, kind) + added}))
            after = seconds(placement)
            bought.append(MemoryPurchase(kind, added, placement.link_bytes, after, before - after))
    return bought
