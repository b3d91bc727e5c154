"""Placement of layers on further accelerators, computed from sizes alone.

These layers stay whole on their accelerator and are computed there; only hidden states cross, megabytes where a layer
has hundreds. So they are used before any layer streams. They are spread among the streamed layers like resident ones,
so that the link reads ahead while they are computed, and they form runs, whose number is limited by the time that
hidden states may take. If nothing streams, they are the last layers, in one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise

from bough.errors import ConfigError
from bough.sizing.placement import (
    Budgets,
    Fixed,
    Placement,
    SeparateExperts,
    Tier,
    gigabytes,
    place,
    place_with_expert_cache,
    spread,
)

CROSSING_SHARE = 0.05  # limit of the crossings' time, as a share of the link's
HOPS_PER_RUN = 2  # to the other accelerator and back
TIMES_AS_SLOW = 2  # a crossing through host memory, compared with a copy from host to device


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
    beside = _beside(fixed, num_layers, num_elsewhere)
    if num_own + num_elsewhere == num_layers:
        rest = Placement((Tier.RESIDENT,) * num_own, (largest,) * num_own, beside, 0)
        return _merged(tuple(layer_bytes), rest, num_elsewhere, room, others[0].hop_bytes)
    own = num_layers - num_elsewhere
    if parts := _first(apart, layer_bytes, own):
        rest = place_with_expert_cache(layer_bytes[:own], parts, beside, budgets, from_host, is_forced)
        if rest.expert_bytes:
            tiers, sizes = rest.tiers + (Tier.ELSEWHERE,) * num_elsewhere, (*rest.layer_bytes, *layer_bytes[own:])
            return replace(rest, tiers=tiers, layer_bytes=sizes, others=_filled(room, num_elsewhere))
    rest = place([largest] * own, beside, budgets)
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
    fits = (n for n in counts if _beside(fixed, num_layers, num_layers - n).total + n * largest <= budgets.device)
    return next(fits, 0)


def _beside(fixed: Fixed, num_layers: int, num_elsewhere: int) -> Fixed:
    """`fixed` without the KV of layers that are elsewhere.

    Buffers for KV on the host have the size of two layers, whatever the number of layers, so they stay.
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
