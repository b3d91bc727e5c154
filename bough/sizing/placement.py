"""Placement of layers in tiers of memory within budgets, computed from sizes alone.

As many layers as fit stay resident; the others stream through a ring. Resident layers are spread evenly among the
streamed ones: while they are computed, the link reads ahead, which keeps the ring from being empty or full for long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, islice, pairwise

from bough.errors import ConfigError

MIN_SLABS = 2  # one in use, one being filled
ENOUGH_SLABS = 0.75  # smallest share of the possible slabs, if each layer then always uses the same slab
RING_SHARE = 0.25  # of the memory left for layers, if not all fit
RING_BYTES = 512 * 1000**2  # or RING_LAYERS if more: default size of a ring
RING_LAYERS = 3  # one computed, one arriving, one arrived; further memory is better used for resident layers
HOST_SLABS, HOST_RING_BYTES = 3, 512 * 1000**2  # size of the ring from disk to pinned memory, the larger of the two
STAGED_LAYERS = 2  # layers whose host KV is staged on the accelerator: one in use, one being copied
CROSSING_SHARE = 0.05  # limit of the crossings' time, as a share of the link's
HOPS_PER_RUN = 2  # to the other accelerator and back
TIMES_AS_SLOW = 2  # a crossing through host memory, compared with a copy from host to device


class Tier(Enum):
    """Where a layer is stored."""

    RESIDENT = "resident"  # in the accelerator's memory
    ELSEWHERE = "elsewhere"  # in the memory of another accelerator, which computes it
    HOST = "host"  # in pinned host memory; only for an accelerator with its own memory
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes taken regardless of the placement; in device memory unless named host."""

    resident: int  # embeddings, final norm, output head
    kv: int
    activations: int
    scratch: int  # for weights unpacked layer by layer
    host_kv: int = 0  # KV slots on the host; `kv` is then their stage
    experts: int = 0  # cache for experts read on demand
    host_experts: int = 0  # experts on the host, from which they are read
    host_embeddings: int = 0  # embeddings looked up on the host

    @property
    def total(self) -> int:
        """Bytes of device memory."""
        return self.resident + self.kv + self.activations + self.scratch + self.experts

    @property
    def kept_on_host(self) -> int:
        """Bytes of host memory without experts."""
        return self.host_kv + self.host_embeddings

    @property
    def on_host(self) -> int:
        """Bytes of host memory."""
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
    """A tier for each layer, and the sizes of the rings for streamed layers."""

    tiers: tuple[Tier, ...]
    layer_bytes: tuple[int, ...]
    fixed: Fixed
    num_slabs: int  # of the ring through which streamed layers reach the accelerator
    num_host_slabs: int = 0  # of the ring from disk to host memory, if there are three tiers
    expert_bytes: int = 0  # of experts read on demand, which are not part of layer_bytes
    others: tuple[int, ...] = ()  # for each layer that is elsewhere, in order: which other accelerator has it

    def layers(self, tier: Tier) -> tuple[int, ...]:
        """Layers of a tier, in order."""
        return tuple(index for index, where in enumerate(self.tiers) if where is tier)

    def num_bytes(self, tier: Tier) -> int:
        """Bytes of all layers of a tier."""
        return sum(self.layer_bytes[index] for index in self.layers(tier))

    @property
    def num_crossings(self) -> int:
        """Times that a sweep's hidden states go from one accelerator to another."""
        others = iter(self.others)
        where = [next(others, 0) if tier is Tier.ELSEWHERE else -1 for tier in self.tiers]
        return sum(before != after for before, after in pairwise((-1, *where, -1)))

    @property
    def slab_bytes(self) -> int:
        """Bytes of the largest streamed layer."""
        return max((self.layer_bytes[index] for index in self.streamed), default=0)

    @property
    def streamed(self) -> tuple[int, ...]:
        """Layers that cross the link in every sweep, in order."""
        return tuple(index for index, where in enumerate(self.tiers) if where in (Tier.HOST, Tier.DISK))

    @property
    def link_bytes(self) -> int:
        """Most bytes that cross the link in a sweep, reached if rows choose all uncached experts."""
        return self.num_bytes(Tier.HOST) + self.num_bytes(Tier.DISK) + max(0, self.expert_bytes - self.fixed.experts)

    @property
    def device_bytes(self) -> int:
        """Bytes taken of the accelerator's memory."""
        return self.fixed.total + self.num_bytes(Tier.RESIDENT) + self.num_slabs * self.slab_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes taken of host memory, for an accelerator with its own memory."""
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
    """Memory limits in bytes."""

    device: int
    host: int  # 0 if the CPU computes
    ring: int  # largest ring, part of the device budget
    max_resident: int  # most resident layers


def place(layer_bytes: Sequence[int], fixed: Fixed, budgets: Budgets) -> Placement:
    """Keep as many layers resident as the budgets allow, and stream the rest.

    Raises:
        ConfigError: a budget is too small for `fixed` and two layers; names its flag.
    """
    sizes, num_layers = tuple(layer_bytes), len(layer_bytes)
    if fixed.kept_on_host > budgets.host:
        kept = "KV slots" if fixed.host_kv else "embeddings"
        less = "; or use a smaller --kv-memory" if fixed.host_kv else ""
        raise ConfigError(
            f"--host-memory: must be more than {gigabytes(fixed.kept_on_host)} for {kept} on the host, "
            f"got {gigabytes(budgets.host)}{less}"
        )
    room = budgets.device - fixed.total
    if sum(sizes) <= room and num_layers <= budgets.max_resident:
        return Placement((Tier.RESIDENT,) * num_layers, sizes, fixed, 0)
    least, ring = least_and_ring(sizes, room, budgets.ring)
    if room < least or ring < least:
        flag, have = ("--device-memory", room) if room < least else ("--ring-memory", ring)
        less = "; or use a smaller --kv-memory" if room < least and fixed.kv > least else ""
        raise ConfigError(
            f"{flag}: must be at least {gigabytes((fixed.total if room < least else 0) + least)} for {MIN_SLABS} "
            f"layers of {gigabytes(max(sizes))}, got {gigabytes(budgets.device if room < least else budgets.ring)}, of "
            f"which {gigabytes(max(have, 0))} are left for layers ({fixed}){less}"
        )
    num_slabs = min(ring // max(sizes), num_layers)
    resident = _most_that_fit(sizes, range(num_layers), room - num_slabs * max(sizes), budgets.max_resident)
    streamed = [index for index in range(num_layers) if index not in resident]
    host, num_host_slabs = _place_on_host(sizes, streamed, budgets.host - fixed.kept_on_host)
    tiers = (Tier.RESIDENT if i in resident else Tier.HOST if i in host else Tier.DISK for i in range(num_layers))
    return Placement(tuple(tiers), sizes, fixed, _in_step(num_slabs, len(streamed)), num_host_slabs)


def default_ring(layer_bytes: Sequence[int]) -> int:
    """Bytes of the largest ring, if no other is configured."""
    return max(RING_BYTES, RING_LAYERS * max(layer_bytes))


def least_and_ring(layer_bytes: Sequence[int], room: int, most: int) -> tuple[int, int]:
    """Bytes of the smallest ring that works, and of the ring in `room` bytes for layers; `most` limits the latter."""
    least = min(MIN_SLABS, len(layer_bytes)) * max(layer_bytes)
    return least, min(most, max(least, int(room * RING_SHARE)))


def _in_step(most: int, num_layers: int) -> int:
    """The number of slabs, reduced a little if each layer then uses the same slab in every sweep.

    Parameters are views of a slab, so they are then created only once for each layer.
    """
    most = min(most, num_layers)
    enough = (slabs for slabs in range(most, 0, -1) if slabs >= ENOUGH_SLABS * most)
    return next((slabs for slabs in enough if num_layers % slabs == 0), most)


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of a model's experts."""

    slab_bytes: int  # of the largest expert
    most: int  # experts in a layer
    num_experts: int  # experts in all layers
    num_bytes: int  # of all experts


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """A mixture-of-experts model whose experts are read on demand, apart from their layers."""

    layer_bytes: Sequence[int]  # without experts
    experts: ExpertSizes
    scratch: int = 0  # like `Fixed.scratch`, for the largest layer without experts and an expert's largest parameter


def place_with_expert_cache(
    layer_bytes: Sequence[int],
    apart: SeparateExperts,
    fixed: Fixed,
    budgets: Budgets,
    from_host: bool = False,
    is_forced: bool = False,
) -> Placement:
    """Keep all layers resident if they fit; otherwise place them without experts, and cache experts in the rest.

    The cache has room for at least all experts of one layer, and for at most those of `budgets.max_resident` layers if
    that is limited. With `from_host`, experts are read from host memory; if they do not all fit there, whole layers are
    placed, unless `is_forced`. `layer_bytes` include experts.

    Raises:
        ConfigError: like `place`; or, with `is_forced`, experts do not fit on the host.
    """
    experts, is_all = apart.experts, sum(layer_bytes) <= budgets.device - fixed.total
    on_host = experts.num_bytes if from_host else 0
    if (is_all and len(layer_bytes) <= budgets.max_resident) or fixed.kept_on_host > budgets.host:
        return place(layer_bytes, fixed, budgets)
    if fixed.kept_on_host + on_host > budgets.host and from_host:
        if not is_forced:
            return place(layer_bytes, fixed, budgets)
        raise ConfigError(
            f"--host-memory: must be at least {gigabytes(fixed.kept_on_host + on_host)} for --experts chosen, which "
            f"keeps {gigabytes(experts.num_bytes)} of experts on the host, got {gigabytes(budgets.host)}; or use "
            "--experts all"
        )
    least = replace(fixed, experts=experts.most * experts.slab_bytes, host_experts=on_host, scratch=apart.scratch)
    placement = place(apart.layer_bytes, least, replace(budgets, host=budgets.host - on_host))
    if from_host and not is_forced and placement.layers(Tier.DISK) and not placement.num_host_slabs:
        return place(layer_bytes, fixed, budgets)  # there is no room on the host for a ring for layers on disk
    count = experts.most + (budgets.device - placement.device_bytes) // experts.slab_bytes
    if budgets.max_resident < len(layer_bytes):
        count = min(count, experts.most * max(1, budgets.max_resident))
    room = min(count, experts.num_experts) * experts.slab_bytes
    return replace(placement, fixed=replace(least, experts=room), expert_bytes=experts.num_bytes)


def _place_on_host(sizes: Sequence[int], streamed: Sequence[int], budget: int) -> tuple[frozenset[int], int]:
    """Layers for host memory, and the number of ring slabs for those that do not fit."""
    if sum(sizes[index] for index in streamed) <= budget:
        return frozenset(streamed), 0
    slab = max(sizes[index] for index in streamed)
    if budget < MIN_SLABS * slab:
        return frozenset(), 0
    enough = max(HOST_SLABS, HOST_RING_BYTES // slab)  # a layer that stays saves more than a larger ring
    num_slabs = max(MIN_SLABS, min(enough, int(budget * RING_SHARE) // slab))
    return _most_that_fit(sizes, streamed, budget - num_slabs * slab, len(streamed)), min(num_slabs, len(streamed))


def _most_that_fit(sizes: Sequence[int], among: Sequence[int], room: int, most: int) -> frozenset[int]:
    """Choose as many layers as fit, spread evenly."""
    for count in range(min(most, len(among)), 0, -1):
        chosen = spread(count, among)
        if sum(sizes[index] for index in chosen) <= room:
            return frozenset(chosen)
    return frozenset()


def spread(count: int, among: Sequence[int]) -> list[int]:
    """`count` of the layers `among`, spread evenly."""
    return [among[(2 * i + 1) * len(among) // (2 * count)] for i in range(count)]


def gigabytes(num_bytes: int) -> str:
    """Format a size for display."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10_000_000 else f"{num_bytes / 1e6:.2f} MB"


@dataclass(frozen=True, slots=True)
class OtherDevice:
    """A further accelerator, its memory budget, and what takes memory there."""

    name: str  # cuda:1
    budget: int  # bytes of its memory that may be used
    fixed: int  # bytes taken for any number of layers: activations, scratch, buffers for KV on the host
    layer_kv: int  # bytes of all sessions' KV in one layer
    hop_bytes: int = 0  # bytes of the hidden states of the largest sweep

    def num_layers(self, layer_bytes: int) -> int:
        """The number of layers of `layer_bytes` that fit.

        Raises:
            ConfigError: not even one fits; names --resident-devices.
        """
        count = (self.budget - self.fixed) // (layer_bytes + self.layer_kv)
        if count < 1:
            least = self.fixed + layer_bytes + self.layer_kv
            raise ConfigError(
                f"--resident-devices: {self.name} must be at least {gigabytes(least)}, for one layer of "
                f"{gigabytes(layer_bytes)}, its KV and buffers, got {gigabytes(self.budget)}"
            )
        return count


def place_with(
    layer_bytes: Sequence[int],
    fixed: Fixed,
    budgets: Budgets,
    others: Sequence[OtherDevice] = (),
    apart: SeparateExperts | None = None,
    from_host: bool = True,
    is_forced: bool = False,
) -> Placement:
    """Keep layers resident on the first accelerator, then on the others, as far as they fit; the rest stream.

    Layers on another accelerator stay whole there and are computed there; only hidden states cross, megabytes where a
    layer has hundreds. So they are used before any layer streams. They are spread among the streamed layers like
    resident ones: the link reads ahead while they are computed. They form runs, whose number is limited by the time
    that hidden states may take. If nothing streams, they are the last layers, in one run.

    All layers are assumed to be as large as the largest. `fixed.kv` is the KV of all layers. With experts `apart`, the
    first accelerator's layers are placed by `place_with_expert_cache`, with `from_host` and `is_forced`.

    Raises:
        ConfigError: like these functions; or a further accelerator is too small for a layer.
    """
    if not others and apart is not None:
        return place_with_expert_cache(layer_bytes, apart, fixed, budgets, from_host, is_forced)
    if not others:
        return place(layer_bytes, fixed, budgets)
    num_layers, largest = len(layer_bytes), max(layer_bytes)
    room = [other.num_layers(largest) for other in others]
    num_own = _most_own(num_layers, largest, fixed, budgets)
    num_elsewhere = min(sum(room), num_layers - num_own)
    own_fixed = _own_fixed(fixed, num_layers, num_elsewhere)
    if num_own + num_elsewhere == num_layers:
        rest = Placement((Tier.RESIDENT,) * num_own, (largest,) * num_own, own_fixed, 0)
        return _merged(tuple(layer_bytes), rest, num_elsewhere, room, others[0].hop_bytes)
    own = num_layers - num_elsewhere
    if parts := _first(apart, layer_bytes, own):
        rest = place_with_expert_cache(layer_bytes[:own], parts, own_fixed, budgets, from_host, is_forced)
        if rest.expert_bytes:
            tiers, sizes = rest.tiers + (Tier.ELSEWHERE,) * num_elsewhere, (*rest.layer_bytes, *layer_bytes[own:])
            return replace(rest, tiers=tiers, layer_bytes=sizes, others=_filled(room, num_elsewhere))
    rest = place([largest] * own, own_fixed, budgets)
    return _merged(tuple(layer_bytes), rest, num_elsewhere, room, others[0].hop_bytes)


def _first(apart: SeparateExperts | None, layer_bytes: Sequence[int], count: int) -> SeparateExperts | None:
    """`apart` restricted to the first `count` layers; None if these have no experts."""
    if apart is None:
        return None
    has_experts = [whole > rest for whole, rest in zip(layer_bytes, apart.layer_bytes, strict=True)]
    num, num_all, experts = sum(has_experts[:count]), sum(has_experts), apart.experts
    if not num:
        return None
    own = replace(
        experts, num_experts=experts.num_experts * num // num_all, num_bytes=experts.num_bytes * num // num_all
    )
    return replace(apart, layer_bytes=apart.layer_bytes[:count], experts=own)


def _most_own(num_layers: int, largest: int, fixed: Fixed, budgets: Budgets) -> int:
    """The most layers that fit on the first accelerator if nothing streams."""
    counts = range(min(num_layers, budgets.max_resident), 0, -1)
    fits = (n for n in counts if _own_fixed(fixed, num_layers, num_layers - n).total + n * largest <= budgets.device)
    return next(fits, 0)


def _own_fixed(fixed: Fixed, num_layers: int, num_elsewhere: int) -> Fixed:
    """`fixed` without the KV of layers that are elsewhere.

    Buffers for KV on the host have the size of two layers for any number of layers, so they stay.
    """
    return fixed if fixed.host_kv else replace(fixed, kv=fixed.kv * (num_layers - num_elsewhere) // num_layers)


def _merged(
    sizes: tuple[int, ...], rest: Placement, num_elsewhere: int, room: Sequence[int], hop_bytes: int
) -> Placement:
    """The placement `rest` with runs of layers elsewhere spread among its streamed layers."""
    streamed = [tier for tier in rest.tiers if tier is not Tier.RESIDENT]
    num_runs = _num_runs(num_elsewhere, rest.link_bytes, hop_bytes)
    cuts = [num_elsewhere * number // num_runs for number in range(num_runs + 1)]
    runs = [(Tier.ELSEWHERE,) * (end - begin) for begin, end in pairwise(cuts)]
    staying = [(Tier.RESIDENT,)] * (len(rest.tiers) - len(streamed)) + runs
    places = dict(zip(spread(len(staying), range(len(staying) + len(streamed))), staying, strict=True))
    others = iter(streamed)
    tiers = (places[at] if at in places else (next(others),) for at in range(len(staying) + len(streamed)))
    together = tuple(chain.from_iterable(tiers))
    return replace(rest, tiers=together, layer_bytes=sizes, others=_filled(room, num_elsewhere))


def _num_runs(num_elsewhere: int, link_bytes: int, hop_bytes: int) -> int:
    """The number of runs of the layers elsewhere, limited by the time of their hops."""
    most = int(CROSSING_SHARE * link_bytes / (HOPS_PER_RUN * TIMES_AS_SLOW * max(1, hop_bytes)))
    return max(1, min(num_elsewhere, most))


def _filled(room: Sequence[int], count: int) -> tuple[int, ...]:
    """The accelerator of each of `count` layers: accelerators are filled one after another."""
    return tuple(islice((number for number, most in enumerate(room) for _ in range(most)), count))
