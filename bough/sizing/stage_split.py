"""Splits a model's layers among the members of a target that spans machines, from sizes and speeds alone.

The first member is the head. A sweep goes through the members one after another, and each reads the layers that do not
stay in its memory ahead during the whole sweep. So a sweep takes the larger of the sum of all compute times and hops,
and the longest time that one member's link needs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from bough.errors import ConfigError
from bough.sizing.placement import default_ring, gigabytes, least_and_ring

ALIKE = 0.05  # share by which sweep times may differ and still count as equal, as measured speeds vary
# Share by which streaming must make sweeps faster if all layers fit into the members' memory: the faster member would
# stream, and is often only the one that was measured in a quieter moment.
WORTH_STREAMING = 0.25
NANO = 1_000_000_000
# Weights of streamed bytes, as powers of two: bytes decide only between equal compute times, a byte counts as much as a
# nanosecond, or compute time decides only between equal bytes. Both sums are below 2**50.
TIES_ONLY, EVEN, BYTES_FIRST = 0, 50, 100


class StageRoom(NamedTuple):
    """A member of a target, and what it offers."""

    name: str
    memory_bytes: int  # for layers and their KV: without embeddings, activations and reserves
    link_bytes_per_second: float  # of layers that do not stay in memory; 0 if it cannot stream
    layer_seconds: float  # of computing a layer, for the same rows on all members; 0 if not measured
    num_threads: int = 0  # of a processor, whose buffers take memory; 0 on a GPU
    kv_on_host: bool = False  # whether keys and values are outside `memory_bytes`


class StageLoad(NamedTuple):
    """What a member holds of its layers, and reads in each sweep."""

    kv_bytes: int
    resident_bytes: int
    streamed_bytes: int


def split_layers(
    layer_bytes: Sequence[int],
    kv_bytes: Sequence[Sequence[int]],
    rooms: Sequence[StageRoom],
    hop_seconds: float = 0.0,
    least_head_layers: int = 1,
) -> list[range]:
    """Consecutive layers for each member, at least one, so that a sweep takes the least time.

    `kv_bytes` are those of each member for each layer.

    If all layers fit, nothing is streamed unless that makes sweeps faster by WORTH_STREAMING. Sweep times within ALIKE
    of the fastest count as equal. Among those splits, few streamed bytes come first, then balance: the slowest member
    computes for as short a time as possible, which is what limits two sweeps in flight.

    Method: a run is a range of layers on one member, whose cost is its compute time and its weighted streamed bytes.
    Dynamic programming over members and their last layers finds the split of the least cost, among runs within limits.
    Three searches use it: for the limit on link times of the fastest sweep, for the largest weight of bytes that is
    not slower than ALIKE, and for the least limit on the compute time of a member.

    Raises:
        ConfigError: there are more members than layers, or they have too little memory; names --stages.
    """
    num_layers = len(layer_bytes)
    require_layers(num_layers, len(rooms), least_head_layers)
    runs = []
    for number, (room, own_kv, layer_seconds) in enumerate(zip(rooms, kv_bytes, _layer_seconds(rooms), strict=True)):
        possible = [*_possible(number, len(rooms), num_layers, least_head_layers)]
        runs.append([*_runs_of(possible, layer_bytes, own_kv, room, layer_seconds)])
        if not runs[-1]:
            raise _too_small(possible, layer_bytes, own_kv, room)
    search = _Search(runs, num_layers)
    hops = round(_hops(rooms, hop_seconds) * NANO)
    fastest = search.fastest(hops)
    if fastest == inf:
        raise _too_small_together(layer_bytes, max(kv_bytes, key=sum), rooms)
    in_memory = _Search([[run for run in own if not run.streamed_bytes] for own in runs], num_layers)
    if (held := in_memory.fastest(hops)) <= fastest * (1 + WORTH_STREAMING):
        search, fastest = in_memory, held
    return [range(run.first, run.end) for run in search.best(int(fastest * (1 + ALIKE)), hops)]


def stage_load(layer_bytes: Sequence[int], kv_bytes: Sequence[int], layers: range, room: StageRoom) -> StageLoad | None:
    """What a member holds and streams of `layers`; None if it can neither hold nor stream them.

    Like `place` it keeps as many layers as fit next to a ring; all are assumed to be as large as the largest.
    """
    sizes, kv = layer_bytes[layers.start : layers.stop], sum(kv_bytes[layers.start : layers.stop])
    total, space = sum(sizes), room.memory_bytes - kv
    if total <= space:
        return StageLoad(kv, total, 0)
    least, ring = least_and_ring(sizes, space, default_ring(sizes))
    if space < least or not room.link_bytes_per_second:
        return None
    largest = max(sizes)
    num_slabs = min(ring // largest, len(sizes))
    resident = total * (space // largest - num_slabs) // len(sizes)
    return StageLoad(kv, resident, total - resident)


class _Run(NamedTuple):
    """Consecutive layers on a member."""

    first: int
    end: int
    streamed_bytes: int
    link: int  # nanoseconds, which add up exactly
    compute: int  # nanoseconds
    share: int  # compute, or the number of layers if no speed is known


class _Search:
    """Finds the best split among the runs that each member can have."""

    def __init__(self, runs: Sequence[Sequence[_Run]], num_layers: int) -> None:
        self._runs, self._num_layers = runs, num_layers

    def fastest(self, hops: int) -> float:
        """Nanoseconds of the fastest sweep; infinite if there is no split.

        The least compute time falls as the limit on link times rises, so the best limit is where they meet.
        """

        def compute(limit: int) -> float:
            found = self._cheapest(TIES_ONLY, limit)
            return inf if found is None else _compute(found) + hops

        limits = sorted({run.link for own in self._runs for run in own})
        meet = bisect_left(limits, True, key=lambda limit: compute(limit) <= limit)
        return min((max(limit, compute(limit)) for limit in limits[max(0, meet - 1) : meet + 1]), default=inf)

    def best(self, limit: int, hops: int) -> Sequence[_Run]:
        """The split to use among those whose sweeps take at most `limit` nanoseconds; there must be one."""

        def within(weight: int, share: float = inf, most_bytes: float = inf) -> Sequence[_Run]:
            found = self._cheapest(weight, limit, share) or ()
            return found if _compute(found) + hops <= limit and _streamed(found) <= most_bytes else ()

        weight = bisect_left(range(1, BYTES_FIRST + 1), True, key=lambda weight: not within(weight))
        streamed = _streamed(within(weight))
        shares = sorted({run.share for own in self._runs for run in own})
        least = bisect_left(shares, True, key=lambda share: bool(within(weight, share, streamed)))
        return within(weight, shares[least], streamed)

    def _cheapest(self, weight: int, most_link: float, most_share: float = inf) -> tuple[_Run, ...] | None:
        """The split of the least total cost from runs within both limits; None if there is none.

        From `weight` to the next, streamed bytes cost twice as much compared with compute time.
        """
        best: dict[int, tuple[int, tuple[_Run, ...]]] = {0: (0, ())}  # by the number of layers before
        for own in self._runs:
            after: dict[int, tuple[int, tuple[_Run, ...]]] = {}
            for run in own:
                if run.first not in best or run.link > most_link or run.share > most_share:
                    continue
                cost, before = best[run.first]
                cost += (run.compute << EVEN) + (run.streamed_bytes << weight)
                if run.end not in after or cost < after[run.end][0]:
                    after[run.end] = cost, (*before, run)
            best = after
        found = best.get(self._num_layers)
        return None if found is None else found[1]


def _possible(number: int, num_members: int, num_layers: int, least_head_layers: int) -> Iterator[range]:
    """The ranges of layers that a member can have, which leave layers for all others."""
    least, num_after = (1, num_members - 1 - number) if number else (least_head_layers, num_members - 1)
    firsts = range(least_head_layers + number - 1, num_layers - num_after) if number else (0,)
    for first in firsts:
        ends = range(first + least, num_layers - num_after + 1) if num_after else (num_layers,)
        yield from (range(first, end) for end in ends)


def _runs_of(
    possible: Sequence[range],
    layer_bytes: Sequence[int],
    kv_bytes: Sequence[int],
    room: StageRoom,
    layer_seconds: float,
) -> Iterator[_Run]:
    """Those of the ranges that a member can hold or stream."""
    for layers in possible:
        load = stage_load(layer_bytes, kv_bytes, layers, room)
        if load is not None:
            link = round(link_seconds(load, room) * NANO)
            compute = round(len(layers) * layer_seconds * NANO)
            yield _Run(layers.start, layers.stop, load.streamed_bytes, link, compute, compute or len(layers))


def _compute(split: Sequence[_Run]) -> int:
    return sum(run.compute for run in split)


def _streamed(split: Sequence[_Run]) -> int:
    return sum(run.streamed_bytes for run in split)


def link_seconds(load: StageLoad, room: StageRoom) -> float:
    return load.streamed_bytes / room.link_bytes_per_second if load.streamed_bytes else 0.0


def _layer_seconds(rooms: Sequence[StageRoom]) -> list[float]:
    """Each member's seconds of a layer; those that are not measured are assumed to be as the others' mean."""
    known = [room.layer_seconds for room in rooms if room.layer_seconds]
    return [room.layer_seconds or (sum(known) / len(known) if known else 0.0) for room in rooms]


def _hops(rooms: Sequence[StageRoom], hop_seconds: float) -> float:
    """Seconds that hidden states take around the ring of members; one member alone has no ring."""
    return len(rooms) * hop_seconds if len(rooms) > 1 else 0.0


def require_layers(num_layers: int, num_members: int, least_head_layers: int = 1) -> None:
    """Raises ConfigError, which names --stages, if there are more members than layers."""
    most = num_layers - least_head_layers + 1
    if num_members > most:
        raise ConfigError(
            f"--stages: must be at most {most}, as each has a layer and the head {least_head_layers} of the model's "
            f"{num_layers}, got {num_members}"
        )


def _too_small(
    possible: Sequence[range], layer_bytes: Sequence[int], kv_bytes: Sequence[int], room: StageRoom
) -> ConfigError:
    """The error that names a member that can have none of its possible ranges."""

    def needed(layers: range) -> int:
        sizes = layer_bytes[layers.start : layers.stop]
        least, _ = least_and_ring(sizes, 0, 0)
        weights = min(sum(sizes), least) if room.link_bytes_per_second else sum(sizes)
        return weights + sum(kv_bytes[layers.start : layers.stop])

    least, layers = min((needed(layers), len(layers)) for layers in possible)
    return ConfigError(
        f"--stages: {room.name} must have at least {gigabytes(least)} for {layers} of the model's layers and their KV "
        f"after embeddings and buffers, got {gigabytes(max(0, room.memory_bytes))}"
    )


def _too_small_together(layer_bytes: Sequence[int], kv_bytes: Sequence[int], rooms: Sequence[StageRoom]) -> ConfigError:
    given = ", ".join(
        f"{room.name} with {gigabytes(max(0, room.memory_bytes))}"
        + ("" if room.link_bytes_per_second else " that cannot stream")
        for room in rooms
    )
    return ConfigError(
        f"--stages: must have room for {len(layer_bytes)} layers of {gigabytes(sum(layer_bytes))} and "
        f"{gigabytes(sum(kv_bytes))} of KV, got {given}; add memory or a machine, or use a smaller --kv-memory"
    )
