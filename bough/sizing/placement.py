"""Which layer lives where, within budgets of memory that are never exceeded. Sizes in, places out: reads nothing.

A byte that stays does not cross the link again, so layers stay resident as far as memory goes. What does not fit
streams through a ring. The resident ones are spread evenly among the others: while they are computed, the link gets
ahead, so that the ring neither starves in one place nor stands full in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from bough.errors import ConfigError

MIN_SLABS = 2  # one that is computed on, one that is filled
ENOUGH_SLABS = 0.75  # of those that there is room for, where that brings layers to the same slabs again and again
RING_SHARE = 0.25  # of the memory left for layers, where not all fit
HOST_SLABS, HOST_RING_BYTES = 3, 512 * 1000**2  # of the ring from disk to pinned memory, whichever is more
STAGED_LAYERS = 2  # whose KV is on the accelerator, where it is kept on the host: one computed on, one on its way


class Tier(Enum):
    """Where a layer lives."""

    RESIDENT = "resident"  # in the accelerator's own memory
    ELSEWHERE = "elsewhere"  # in another accelerator's, which computes it
    HOST = "host"  # in pinned memory of the host; only where that is not the accelerator's own
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes of memory that are taken whatever the placement: of the device's, where nothing else is said."""

    resident: int  # embeddings, final norm, output head
    kv: int
    activations: int
    scratch: int  # for weights that are unpacked layer by layer
    host_kv: int = 0  # of the host's memory, where slots are kept there; `kv` is then the stage
    experts: int = 0  # room for those that come when rows choose them
    host_experts: int = 0  # of the host's memory, from which they then come
    host_embeddings: int = 0  # of the host's memory, where they are looked up there

    @property
    def total(self) -> int:
        """Of device memory."""
        return self.resident + self.kv + self.activations + self.scratch + self.experts

    @property
    def kept_on_host(self) -> int:
        """Of the host's memory, where that is not the accelerator's, before any experts."""
        return self.host_kv + self.host_embeddings

    @property
    def on_host(self) -> int:
        """Of the host's memory in all."""
        return self.kept_on_host + self.host_experts

    def __str__(self) -> str:
        kv = "KV stage" if self.host_kv else "KV slots"
        names = {"embeddings and head": self.resident, kv: self.kv, "activations": self.activations}
        if self.scratch:
            names["unpacking"] = self.scratch
        if self.experts:
            names["experts"] = self.experts
        if self.host_kv:
            names["KV slots on the host"] = self.host_kv
        if self.host_experts:
            names["experts on the host"] = self.host_experts
        if self.host_embeddings:
            names["embeddings on the host"] = self.host_embeddings
        return ", ".join(f"{name} {gigabytes(size)}" for name, size in names.items())


@dataclass(frozen=True, slots=True)
class Placement:
    """A tier for each layer, and the slabs through which the others stream."""

    tiers: tuple[Tier, ...]
    layer_bytes: tuple[int, ...]
    fixed: Fixed
    num_slabs: int  # of the ring through which layers that are not resident reach the accelerator
    num_host_slabs: int = 0  # of the ring between disk and host memory, where there are three tiers
    expert_bytes: int = 0  # of experts that come when rows choose them, and are in no layer's bytes
    others: tuple[int, ...] = ()  # by layer that is elsewhere, in order: which of the other accelerators has it

    def layers(self, tier: Tier) -> tuple[int, ...]:
        """Layers of a tier, in order."""
        return tuple(index for index, where in enumerate(self.tiers) if where is tier)

    def num_bytes(self, tier: Tier) -> int:
        """Of all layers of a tier."""
        return sum(self.layer_bytes[index] for index in self.layers(tier))

    @property
    def slab_bytes(self) -> int:
        """The largest layer that streams."""
        return max((self.layer_bytes[index] for index in self.streamed), default=0)

    @property
    def streamed(self) -> tuple[int, ...]:
        """Layers that cross the link in every sweep, in order."""
        return tuple(index for index, where in enumerate(self.tiers) if where in (Tier.HOST, Tier.DISK))

    @property
    def link_bytes(self) -> int:
        """What crosses the link in every sweep; of experts those that find no room, if rows choose them all."""
        return self.num_bytes(Tier.HOST) + self.num_bytes(Tier.DISK) + max(0, self.expert_bytes - self.fixed.experts)

    @property
    def device_bytes(self) -> int:
        """What is taken of the accelerator's memory."""
        return self.fixed.total + self.num_bytes(Tier.RESIDENT) + self.num_slabs * self.slab_bytes

    @property
    def host_bytes(self) -> int:
        """What is taken of the host's memory, where that is not the accelerator's."""
        layers = self.num_bytes(Tier.HOST) + self.num_host_slabs * self.slab_bytes
        return self.fixed.on_host + layers

    def __str__(self) -> str:
        parts = [
            f"{len(self.layers(tier))} layers {tier.value} ({gigabytes(self.num_bytes(tier))})"
            for tier in Tier
            if self.layers(tier)
        ]
        if self.num_slabs:
            parts.append(f"ring of {self.num_slabs} slabs ({gigabytes(self.num_slabs * self.slab_bytes)})")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Budgets:
    """What may be taken, in bytes."""

    device: int
    host: int  # 0 where the host is the accelerator
    ring: int  # at most, of the device budget
    max_resident: int  # layers at most


def place(layer_bytes: Sequence[int], fixed: Fixed, budgets: Budgets) -> Placement:
    """Keeps as many layers resident as the budgets allow, and streams the rest.

    Raises:
        ConfigError: the budget holds not even two layers beside what is always there.
    """
    sizes, num_layers = tuple(layer_bytes), len(layer_bytes)
    if fixed.kept_on_host > budgets.host:
        kept = "KV slots" if fixed.host_kv else "embeddings"
        less = ", or less --kv-memory," if fixed.host_kv else ""
        raise ConfigError(
            f"--host-memory: {gigabytes(budgets.host)}; {kept} kept there take {gigabytes(fixed.kept_on_host)}: "
            f"more{less} would do"
        )
    room = budgets.device - fixed.total
    if sum(sizes) <= room and num_layers <= budgets.max_resident:
        return Placement((Tier.RESIDENT,) * num_layers, sizes, fixed, 0)
    least = min(MIN_SLABS, num_layers) * max(sizes)
    ring = min(budgets.ring, max(least, int(room * RING_SHARE)))
    if room < least or ring < least:
        flag, have = ("--device-memory", room) if room < least else ("--ring-memory", ring)
        less = ", or less --kv-memory," if room < least and fixed.kv > least else ""
        raise ConfigError(
            f"{flag}: {gigabytes(budgets.device if room < least else budgets.ring)}; {gigabytes(max(have, 0))} are "
            f"left for layers ({fixed}), but {MIN_SLABS} layers of {gigabytes(max(sizes))} must fit; "
            f"{gigabytes((fixed.total if room < least else 0) + least)} or more{less} would do"
        )
    num_slabs = min(ring // max(sizes), num_layers)
    resident = _most_that_fit(sizes, range(num_layers), room - num_slabs * max(sizes), budgets.max_resident)
    streamed = [index for index in range(num_layers) if index not in resident]
    host, num_host_slabs = _place_on_host(sizes, streamed, budgets.host - fixed.kept_on_host)
    tiers = (Tier.RESIDENT if i in resident else Tier.HOST if i in host else Tier.DISK for i in range(num_layers))
    return Placement(tuple(tiers), sizes, fixed, _in_step(num_slabs, len(streamed)), num_host_slabs)


def _in_step(most: int, num_layers: int) -> int:
    """Slabs of a ring, a few fewer than the most where every layer then comes to the same slab in every sweep.

    What is made of a layer's bytes is made for a slab, so it is made once, and kept for no more places than layers.
    """
    most = min(most, num_layers)
    enough = (slabs for slabs in range(most, 0, -1) if slabs >= ENOUGH_SLABS * most)
    return next((slabs for slabs in enough if num_layers % slabs == 0), most)


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Of the experts of a model."""

    slab_bytes: int  # of the largest
    most: int  # in a layer
    num_experts: int  # in all layers
    num_bytes: int  # of all


@dataclass(frozen=True, slots=True)
class Apart:
    """A mixture of experts whose experts come when rows choose them."""

    layer_bytes: Sequence[int]  # without them
    experts: ExpertSizes
    scratch: int = 0  # as `Fixed.scratch`: of the largest layer without them, and of one expert's largest parameter


def place_apart(
    layer_bytes: Sequence[int],
    apart: Apart,
    fixed: Fixed,
    budgets: Budgets,
    from_host: bool = False,
    is_forced: bool = False,
) -> Placement:
    """As `place`, if everything stays; otherwise of layers without their experts, which get the room that is left.

    That is for all experts of a layer at least, and where it is said how many layers stay, of so many, if there is
    room. `from_host`: they come to an accelerator with memory of its own from the host's; where not all of them find
    room there, layers are placed whole, unless `is_forced`. `layer_bytes` are with experts.

    Raises:
        ConfigError: as `place`.
    """
    experts, is_all = apart.experts, sum(layer_bytes) <= budgets.device - fixed.total
    on_host = experts.num_bytes if from_host else 0
    if (is_all and len(layer_bytes) <= budgets.max_resident) or fixed.kept_on_host > budgets.host:
        return place(layer_bytes, fixed, budgets)
    if fixed.kept_on_host + on_host > budgets.host and from_host:
        if not is_forced:
            return place(layer_bytes, fixed, budgets)
        raise ConfigError(
            f"--host-memory: {gigabytes(budgets.host)}; --experts chosen takes them from the host's memory, all "
            f"{gigabytes(experts.num_bytes)}: {gigabytes(fixed.kept_on_host + on_host)} or more, or --experts all, "
            "would do"
        )
    least = replace(fixed, experts=experts.most * experts.slab_bytes, host_experts=on_host, scratch=apart.scratch)
    placement = place(apart.layer_bytes, least, replace(budgets, host=budgets.host - on_host))
    if from_host and not is_forced and placement.layers(Tier.DISK) and not placement.num_host_slabs:
        return place(layer_bytes, fixed, budgets)  # the rest, on its way from disk, would find no room on the host
    count = experts.most + (budgets.device - placement.device_bytes) // experts.slab_bytes
    if budgets.max_resident < len(layer_bytes):
        count = min(count, experts.most * max(1, budgets.max_resident))
    room = min(count, experts.num_experts) * experts.slab_bytes
    return replace(placement, fixed=replace(least, experts=room), expert_bytes=experts.num_bytes)


def _place_on_host(sizes: Sequence[int], streamed: Sequence[int], budget: int) -> tuple[frozenset[int], int]:
    """Layers for host memory, and slabs of a ring for those that find no room there."""
    if sum(sizes[index] for index in streamed) <= budget:
        return frozenset(streamed), 0
    slab = max(sizes[index] for index in streamed)
    if budget < MIN_SLABS * slab:
        return frozenset(), 0
    enough = max(HOST_SLABS, HOST_RING_BYTES // slab)  # a layer that stays is worth more than one that is ahead
    num_slabs = max(MIN_SLABS, min(enough, int(budget * RING_SHARE) // slab))
    return _most_that_fit(sizes, streamed, budget - num_slabs * slab, len(streamed)), min(num_slabs, len(streamed))


def _most_that_fit(sizes: Sequence[int], among: Sequence[int], room: int, most: int) -> frozenset[int]:
    """As many layers as fit, evenly spread."""
    for count in range(min(most, len(among)), 0, -1):
        chosen = spread(count, among)
        if sum(sizes[index] for index in chosen) <= room:
            return frozenset(chosen)
    return frozenset()


def spread(count: int, among: Sequence[int]) -> list[int]:
    """`count` of some layers, as evenly as can be."""
    return [among[(2 * i + 1) * len(among) // (2 * count)] for i in range(count)]


def gigabytes(num_bytes: int) -> str:
    """For people."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10_000_000 else f"{num_bytes / 1e6:.2f} MB"
