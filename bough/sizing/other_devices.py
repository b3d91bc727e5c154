"""Layers on other accelerators than the one that a sweep goes through: which, and how many. Sizes in, places out.

They stay there and are computed there; what crosses to them and back is a batch's hidden states, megabytes where a
layer is hundreds of them. So they are taken before any layer streams, and stand among those that do as resident ones
would: while they are computed, the link gets ahead. Where nothing streams, they are the last layers, in one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bough.errors import ConfigError
from bough.sizing.placement import Budgets, Fixed, Placement, Tier, gigabytes, place, spread


@dataclass(frozen=True, slots=True)
class OtherDevice:
    """Another accelerator, and what of its memory is taken."""

    name: str  # cuda:1
    budget: int  # bytes in all
    fixed: int  # whatever it holds: activations, scratch
    layer_kv: int  # by each of its layers: the keys and values of all sessions

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


def place_with(layer_bytes: Sequence[int], fixed: Fixed, budgets: Budgets, others: Sequence[OtherDevice]) -> Placement:
    """As `place`, with as many layers on other accelerators as they hold and the first one does not.

    Layers are counted as if all were of the largest one's size. `fixed.kv` is that of all layers.

    Raises:
        ConfigError: as `place`, or another accelerator holds no layer.
    """
    if not others:
        return place(layer_bytes, fixed, budgets)
    num_layers, largest = len(layer_bytes), max(layer_bytes)
    room = [other.num_layers(largest) for other in others]
    num_own = _most_own(num_layers, largest, fixed, budgets)
    num_elsewhere = min(sum(room), num_layers - num_own)
    if num_own + num_elsewhere == num_layers:
        rest = Placement((Tier.RESIDENT,) * num_own, (largest,) * num_own, _beside(fixed, num_layers, num_elsewhere), 0)
    else:
        beside = _beside(fixed, num_layers, num_elsewhere)
        rest = place([largest] * (num_layers - num_elsewhere), beside, budgets)
    return _merged(tuple(layer_bytes), rest, num_elsewhere, room)


def _most_own(num_layers: int, largest: int, fixed: Fixed, budgets: Budgets) -> int:
    """Layers that the first accelerator holds where nothing streams through it."""
    counts = range(min(num_layers, budgets.max_resident), 0, -1)
    fits = (n for n in counts if _beside(fixed, num_layers, num_layers - n).total + n * largest <= budgets.device)
    return next(fits, 0)


def _beside(fixed: Fixed, num_layers: int, num_elsewhere: int) -> Fixed:
    """What the first accelerator has to hold when so many layers, and their KV, are elsewhere."""
    return replace(fixed, kv=fixed.kv * (num_layers - num_elsewhere) // num_layers)


def _merged(sizes: tuple[int, ...], rest: Placement, num_elsewhere: int, room: Sequence[int]) -> Placement:
    """The rest's layers with those elsewhere among them."""
    num_own = len(rest.layers(Tier.RESIDENT))
    staying = spread(num_own + num_elsewhere, range(len(sizes)))
    own, elsewhere = frozenset(staying[:num_own]), frozenset(staying[num_own:])
    streamed = iter([tier for tier in rest.tiers if tier is not Tier.RESIDENT])
    tiers = tuple(
        Tier.RESIDENT if i in own else Tier.ELSEWHERE if i in elsewhere else next(streamed) for i in range(len(sizes))
    )
    numbers = [number for number, count in enumerate(room) for _ in range(count)]
    return replace(rest, tiers=tiers, layer_bytes=sizes, others=tuple(numbers[:num_elsewhere]))
