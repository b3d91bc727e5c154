"""Layers on other accelerators than the one that a sweep goes through: which, and how many. Sizes in, places out.

They stay there, whole, and are computed there; what crosses to them and back is a batch's hidden states, megabytes
where a layer is hundreds of them. So they are taken before any layer streams, and stand among those that do as
resident ones would: while they are computed, the link gets ahead. They do so in runs, the fewer the less crosses the
link beside what hidden states take. Where nothing streams, they are the last layers, in one run.
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

CROSSING_SHARE = 0.05  # of the time that the link takes, which hidden states may take to cross
HOPS_PER_RUN = 2  # there and back
TIMES_AS_SLOW = 2  # from one accelerator to another, through the host's memory, as from the host to one


@dataclass(frozen=True, slots=True)
class OtherDevice:
    """Another accelerator, and what of its memory is taken."""

    name: str  # cuda:1
    budget: int  # bytes in all
    fixed: int  # whatever it holds: activations, scratch, a stage for KV that is on the host
    layer_kv: int  # by each of its layers: the keys and values of all sessions
    hop_bytes: int = 0  # hidden states of the largest sweep

    def num_layers(self, layer_bytes: int) -> int:
        """That it holds, of layers of so many bytes.

        Raises:
            ConfigError: none.
        """
        count = (self.budget - self.fixed) // (layer_bytes + self.layer_kv)
        if count < 1:
            least = self.fixed + layer_bytes + self.layer_kv
            raise ConfigError(
                f"--resident-devices: value was {self.name}={gigabytes(self.budget)}; must be {gigabytes(least)} or "
                f"more, for one layer of {gigabytes(layer_bytes)}, its KV and what computes it"
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
    """As `place`, with as many layers on other accelerators as they hold and the first one does not.

    Layers are counted as if all were of the largest one's size. `fixed.kv` is that of all layers. With experts `apart`
    the layers of the first accelerator are placed as `place_with_expert_cache` does, with its last two arguments.

    Raises:
        ConfigError: as these two, or another accelerator holds no layer.
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
    """Of the first layers, so many of them; None where these have no experts."""
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
    """Layers that the first accelerator holds where nothing streams through it."""
    counts = range(min(num_layers, budgets.max_resident), 0, -1)
    fits = (n for n in counts if _beside(fixed, num_layers, num_layers - n).total + n * largest <= budgets.device)
    return next(fits, 0)


def _beside(fixed: Fixed, num_layers: int, num_elsewhere: int) -> Fixed:
    """What the first accelerator has to hold when so many layers, and their KV, are elsewhere.

    A stage for KV that is on the host is two layers' room, however many layers there are.
    """
    return fixed if fixed.host_kv else replace(fixed, kv=fixed.kv * (num_layers - num_elsewhere) // num_layers)


def _merged(
    sizes: tuple[int, ...], rest: Placement, num_elsewhere: int, room: Sequence[int], hop_bytes: int
) -> Placement:
    """The rest's layers with those elsewhere among them."""
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
    """Into which so many layers are parted, of which each costs its hops."""
    most = int(CROSSING_SHARE * link_bytes / (HOPS_PER_RUN * TIMES_AS_SLOW * max(1, hop_bytes)))
    return max(1, min(num_elsewhere, most))


def _filled(room: Sequence[int], count: int) -> tuple[int, ...]:
    """Which of the others each of so many layers is on: one after another, as many as each has room for."""
    return tuple(islice((number for number, most in enumerate(room) for _ in range(most)), count))
