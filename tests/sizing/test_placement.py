"""Where layers live: budgets are kept, memory is used, and what streams is spread."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import ConfigError
from bough.sizing.placement import MIN_SLABS, Budgets, Fixed, Placement, Tier, place, spread

NOTHING = Fixed(0, 0, 0, 0)
SIZES = st.lists(st.integers(50, 150), min_size=1, max_size=60)


def budgets(device: int, host: int = 0, ring: int = 10**9, max_resident: int = 10**9) -> Budgets:
    return Budgets(device, host, ring, max_resident)


@given(
    sizes=SIZES,
    device=st.integers(0, 12_000),
    host=st.integers(0, 12_000),
    ring=st.integers(0, 4_000),
    host_kv=st.sampled_from([0, 3_000]),
)
def test_budgets_are_never_exceeded(sizes: list[int], device: int, host: int, ring: int, host_kv: int) -> None:
    fixed = Fixed(100, 200, 50, 7, host_kv)
    try:
        placement = place(sizes, fixed, budgets(device, host, ring))
    except ConfigError:
        assert min(device - fixed.total, ring) < MIN_SLABS * max(sizes) or host < host_kv
        return
    assert placement.device_bytes <= device
    assert placement.host_bytes <= host
    assert len(placement.tiers) == len(sizes)
    streams = len(placement.layers(Tier.HOST)) + len(placement.layers(Tier.DISK))
    assert placement.num_slabs >= min(MIN_SLABS, streams)
    assert placement.num_slabs * placement.slab_bytes <= max(ring, 0) or not streams


@given(sizes=SIZES, device=st.integers(400, 12_000))
def test_more_memory_never_increases_bytes_over_the_link(sizes: list[int], device: int) -> None:
    less, more = (place([100] * len(sizes), NOTHING, budgets(size)) for size in (device, device + 100))
    assert more.link_bytes <= less.link_bytes


def test_everything_that_fits_is_resident_and_there_is_no_ring() -> None:
    placement = place([100] * 8, Fixed(10, 20, 30, 40), budgets(900))
    assert (placement.link_bytes, placement.num_slabs, placement.device_bytes) == (0, 0, 900)


def test_streamed_layers_are_spread_so_that_the_ring_never_starves() -> None:
    placement = place([100] * 80, NOTHING, budgets(4_000, ring=400))
    streamed = placement.layers(Tier.DISK)
    gaps = [right - left for left, right in itertools.pairwise(streamed)]
    assert len(streamed) == 80 - 36
    assert max(gaps) - min(gaps) <= 1


def test_host_memory_is_filled_before_the_disk() -> None:
    placement = place([100] * 40, NOTHING, budgets(1_000, host=2_000, ring=400))
    assert len(placement.layers(Tier.RESIDENT)) == 8
    assert placement.num_host_slabs == 5
    assert len(placement.layers(Tier.HOST)) == 15
    all_in_ram = place([100] * 40, NOTHING, budgets(1_000, host=4_000, ring=400))
    assert (len(all_in_ram.layers(Tier.DISK)), all_in_ram.num_host_slabs) == (0, 0)


def test_the_number_of_resident_layers_can_be_limited() -> None:
    assert place([100] * 8, NOTHING, budgets(10_000, max_resident=0)).link_bytes == 800
    assert len(place([100] * 8, NOTHING, budgets(10_000, max_resident=3)).layers(Tier.RESIDENT)) == 3


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (budgets(350), r"--device-memory: must be .* for 2 layers of 0\.00 MB, got 0\.00 MB"),
        (budgets(1_000, ring=150), r"--ring-memory: must be .* got 0\.00 MB"),
    ],
)
def test_a_budget_that_is_too_small_is_refused_with_the_least_possible_one(limits: Budgets, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place([100] * 80, Fixed(100, 100, 0, 0), limits)
    with pytest.raises(ConfigError, match=r"; or use a smaller --kv-memory"):
        place([100] * 80, Fixed(100, 300, 0, 0), budgets(500))


@pytest.mark.parametrize(("room", "slabs"), [(29, 25), (25, 25), (141, 141), (3, 3), (2, 2), (400, 300)])
def test_a_slightly_smaller_ring_keeps_the_same_resident_layers(room: int, slabs: int) -> None:
    """Of 300 layers, where that takes no more than a quarter of the ring."""
    placement = place([10] * 300, Fixed(0, 0, 0, 0), budgets(10**5, ring=10 * room, max_resident=0))
    assert placement.num_slabs == slabs


def test_spread_layers_are_even_and_within_range() -> None:
    assert spread(2, range(8)) == [2, 6]
    assert spread(8, range(8)) == list(range(8))
    assert spread(0, range(8)) == []


def test_a_placement_describes_itself() -> None:
    placement: Placement = place([30_000_000] * 4, NOTHING, budgets(100_000_000, ring=60_000_000))
    assert str(placement) == "1 layers resident (0.03 GB), 3 layers disk (0.09 GB), ring of 2 slabs (0.06 GB)"
