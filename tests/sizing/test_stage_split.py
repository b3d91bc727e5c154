"""The split of layers among stages: as fast as the best of all splits, few bytes streamed, balanced, errors by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bough.errors import ConfigError
from bough.sizing.placement import Budgets, Fixed, default_ring, place
from bough.sizing.stage_split import (
    ALIKE,
    WORTH_STREAMING,
    StageRoom,
    _hops,
    _layer_seconds,
    link_seconds,
    split_layers,
    stage_load,
)

MB, GB = 10**6, 10**9
TOLERANCE = 1 + 1e-6  # of rounding to nanoseconds

SPEEDS = st.sampled_from([0.0, 0.001, 0.00101, 0.004])
ROOMS = st.builds(
    StageRoom,
    st.just("a"),
    st.integers(100, 2000).map(lambda size: size * MB),
    st.sampled_from([0.0, GB / 2, 2.0 * GB]),
    SPEEDS,
)
MODELS = st.lists(
    st.tuples(st.integers(50, 150).map(lambda size: size * MB), st.integers(0, 10).map(lambda size: size * MB)),
    min_size=3,
    max_size=8,
)


def room(name: str, gigabytes: float, link: float = 0.5, layer_seconds: float = 0.01) -> StageRoom:
    return StageRoom(name, int(gigabytes * GB), link * GB, layer_seconds)


def divided(
    sizes: Sequence[int], kv: Sequence[int], rooms: Sequence[StageRoom], hop: float = 0.0, least_head_layers: int = 1
) -> list[range]:
    """The split if KV takes as much memory on all machines."""
    return split_layers(sizes, [kv] * len(rooms), rooms, hop, least_head_layers)


def sweep_seconds(
    sizes: Sequence[int], kv: Sequence[int], rooms: Sequence[StageRoom], split: Sequence[range], hop: float = 0.0
) -> float:
    """Predicted seconds of a sweep; each member must be able to hold or stream its layers."""
    compute = sum(len(layers) * each for layers, each in zip(split, _layer_seconds(rooms), strict=True))
    loads = [stage_load(sizes, kv, layers, room) for layers, room in zip(split, rooms, strict=True)]
    links = [link_seconds(load, room) for load, room in zip(loads, rooms, strict=True) if load is not None]
    assert len(links) == len(rooms)
    return max(compute + _hops(rooms, hop), *links)


def all_splits(num_layers: int, num_members: int, least_head_layers: int = 1) -> Iterator[list[range]]:
    for cuts in combinations(range(1, num_layers), num_members - 1):
        bounds = [0, *cuts, num_layers]
        if bounds[1] >= least_head_layers:
            yield [range(begin, end) for begin, end in pairwise(bounds)]


def streamed(sizes: Sequence[int], kv: Sequence[int], rooms: Sequence[StageRoom], split: Sequence[range]) -> int | None:
    """Bytes of a sweep over all links; None if a member can neither hold nor stream its layers."""
    loads = [stage_load(sizes, kv, layers, each) for layers, each in zip(split, rooms, strict=True)]
    known = [load.streamed_bytes for load in loads if load is not None]
    return sum(known) if len(known) == len(loads) else None


@given(
    model=MODELS,
    rooms=st.lists(ROOMS, min_size=1, max_size=3),
    hop=st.sampled_from([0.0, 0.01]),
    least=st.integers(1, 2),
)
def test_no_other_split_is_as_fast_with_fewer_bytes(
    model: list[tuple[int, int]], rooms: list[StageRoom], hop: float, least: int
) -> None:
    sizes, kv = zip(*model, strict=True)
    assume(len(rooms) + least - 1 <= len(sizes))
    every = [*all_splits(len(sizes), len(rooms), least)]
    costs = {
        number: (sweep_seconds(sizes, kv, rooms, split, hop), num_bytes)
        for number, split in enumerate(every)
        if (num_bytes := streamed(sizes, kv, rooms, split)) is not None
    }
    if not costs:
        with pytest.raises(ConfigError, match="--stages: "):
            divided(sizes, kv, rooms, hop, least)
        return
    slowest = min(costs.values())[0] * (1 + WORTH_STREAMING)
    if in_memory := {number: cost for number, cost in costs.items() if not cost[1]}:
        held = min(in_memory.values())[0]
        assume(not slowest / TOLERANCE <= held <= slowest * TOLERANCE)
        costs = in_memory if held < slowest else costs
    found = divided(sizes, kv, rooms, hop, least)
    seconds, num_bytes = costs[every.index(found)]
    fastest, fewest = min(costs.values())[0], min(num_bytes for _, num_bytes in costs.values())
    assert seconds <= fastest * (1 + ALIKE) * TOLERANCE + 1e-9
    alike = [cost for cost in costs.values() if cost[0] <= fastest * (1 + ALIKE) / TOLERANCE]
    if fewest in [others for _, others in alike]:
        assert num_bytes == fewest
    if len({each.layer_seconds for each in rooms}) == 1:
        # Compute then takes the same time in all splits, so the choice is exact.
        assert num_bytes <= min(others for _, others in alike)
        same = [every[number] for number, cost in costs.items() if cost in alike and cost[1] <= num_bytes]
        assert max(map(len, found)) <= min(max(map(len, split)) for split in same)


@given(model=MODELS, each=ROOMS, count=st.integers(1, 4))
def test_layers_are_consecutive_and_complete(model: list[tuple[int, int]], each: StageRoom, count: int) -> None:
    sizes, kv = zip(*model, strict=True)
    assume(count <= len(sizes))
    try:
        split = divided(sizes, kv, [each] * count)
    except ConfigError:
        return
    assert [layer for layers in split for layer in layers] == [*range(len(sizes))]
    assert all(len(layers) for layers in split)


@given(
    count=st.integers(1, 40),
    size=st.integers(1, 400),
    kv=st.integers(0, 40),
    gigabytes=st.integers(1, 8),
)
def test_a_member_streams_what_its_placement_streams(count: int, size: int, kv: int, gigabytes: int) -> None:
    sizes, kv_sizes, each = [size * MB] * count, [kv * MB] * count, room("a", gigabytes)
    load = stage_load(sizes, kv_sizes, range(count), each)
    budgets = Budgets(each.memory_bytes, 0, default_ring(sizes), count)
    try:
        placement = place(sizes, Fixed(0, sum(kv_sizes), 0, 0), budgets)
    except ConfigError:
        assert load is None
        return
    assert load == (sum(kv_sizes), sum(sizes) - placement.link_bytes, placement.link_bytes)


def test_similar_machines_get_equal_numbers_of_layers() -> None:
    """Otherwise a sweep would be 1 % faster and two in flight almost twice as slow."""
    rooms = [room("head", 8, layer_seconds=0.01), room("b", 8, layer_seconds=0.0101)]
    assert divided([100 * MB] * 20, [MB] * 20, rooms) == [range(10), range(10, 20)]
    with_slow_one = [*rooms, room("c", 8, layer_seconds=0.1)]
    assert [len(layers) for layers in divided([100 * MB] * 21, [MB] * 21, with_slow_one)] == [10, 10, 1]


def test_a_much_faster_machine_gets_as_much_as_it_can_hold() -> None:
    rooms = [room("head", 1.0, layer_seconds=0.04), room("b", 1.0, layer_seconds=0.001)]
    split = divided([100 * MB] * 12, [0] * 12, rooms)
    assert [len(layers) for layers in split] == [2, 10]


@pytest.mark.parametrize(("slower", "streams"), [(1.7, False), (20.0, True)])
def test_only_a_much_faster_machine_streams_what_both_could_hold(slower: float, streams: bool) -> None:
    """A measurement beside another program's start made 82 of 300 layers stream."""
    rooms = [room("head", 1.0, link=9, layer_seconds=0.01 * slower), room("b", 1.0, link=9, layer_seconds=0.01)]
    split = divided([50 * MB] * 30, [0] * 30, rooms)
    assert bool(streamed([50 * MB] * 30, [0] * 30, rooms, split)) == streams


def test_machines_that_are_too_small_stream_for_equal_times() -> None:
    """From a disk four times as fast, four times as many layers; compute is shorter than both."""
    rooms = [room("head", 1.0, link=0.5, layer_seconds=0.0), room("b", 1.0, link=2.0, layer_seconds=0.0)]
    split = divided([100 * MB] * 60, [0] * 60, rooms)
    loads = [stage_load([100 * MB] * 60, [0] * 60, layers, each) for layers, each in zip(split, rooms, strict=True)]
    times = [
        load.streamed_bytes / each.link_bytes_per_second
        for load, each in zip(loads, rooms, strict=True)
        if load is not None
    ]
    assert max(times) - min(times) <= 0.2, "a layer more or less of the slow disk"
    assert sweep_seconds([100 * MB] * 60, [0] * 60, rooms, split) == max(times)


def test_a_sweep_has_one_hop_for_each_further_machine() -> None:
    sizes, kv = [MB] * 4, [0] * 4
    three = [room(name, 1) for name in "abc"]
    assert sweep_seconds(sizes, kv, three, divided(sizes, kv, three), 0.5) == pytest.approx(1.54)
    assert sweep_seconds(sizes, kv, three[:1], divided(sizes, kv, three[:1]), 0.5) == pytest.approx(0.04)


def test_the_largest_targets_are_split_within_seconds() -> None:
    """100 layers on 8 machines, none of which is like another."""
    rooms = [room(f"m{i}", 3 + i / 2, link=0.5 + i / 4, layer_seconds=0.01 + i / 1000) for i in range(8)]
    split = divided([700 * MB] * 100, [5 * MB] * 100, rooms, 0.001)
    assert sum(map(len, split)) == 100


@pytest.mark.parametrize(
    ("rooms", "message"),
    [
        ([room(name, 1) for name in "abcde"], "--stages: must be at most 4, as each has a layer .* 4, got 5"),
        ([room("a", 1), room("b", 0.05)], r"--stages: b must have at least 0\.11 GB for 1 of .*, got 0\.05 GB"),
        (
            [room("a", 0.2, link=0), room("b", 0.2, link=0)],
            r"room for 4 layers of 0\.40 GB and .* a with 0\.20 GB that",
        ),
        ([room("a", 0.2, link=0)], r"--stages: a must have at least 0\.44 GB for 4 of the model's layers"),
        ([room("a", 0.2)], r"--stages: a must have at least 0\.24 GB for 4 of the model's layers"),
    ],
)
def test_insufficient_memory_is_reported_by_machine(rooms: list[StageRoom], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        divided([100 * MB] * 4, [10 * MB] * 4, rooms)


def test_a_machine_with_its_kv_elsewhere_gets_more_layers() -> None:
    rooms, kv = [room("head", 1.0), room("b", 1.0)], [100 * MB] * 15
    assert [len(each) for each in split_layers([100 * MB] * 15, [kv, [0] * 15], rooms)] == [5, 10]


def test_the_head_needs_its_least_layers() -> None:
    sizes, kv = [100 * MB] * 4, [0] * 4
    rooms = [room("a", 1, layer_seconds=1.0), room("b", 1, layer_seconds=0.1)]
    assert divided(sizes, kv, rooms, least_head_layers=3) == [range(3), range(3, 4)]
    with pytest.raises(ConfigError, match="must be at most 1, as each has a layer and the head 4 of the model's 4"):
        divided(sizes, kv, rooms, least_head_layers=4)
