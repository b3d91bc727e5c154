"""The ring to a device: right bytes in any order of work, no slab written while it is read, ahead of the sweep."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.errors import StreamError
from bough.model.batch.batch import Batch, Segment
from bough.sizing.placement import Tier
from bough.trees.tree import Tree
from loadtest.common.inline_streams import InlineStreams
from loadtest.common.packed_model import pack
from loadtest.common.tiny_model import TINY, save_model
from target_worker.link.device_ring import DeviceRing
from tests.fakes.gpu.late_device import FakeEvent, FakeStreams
from tests.fakes.gpu.pretend import EagerMode
from tests.fakes.models import new_slot, plain_logits, streamed
from tests.target_worker.link.test_disk_ring import until_carried

INDICES = (0, 2, 3, 5, 6)  # the others are resident
SIZE = 1000
STAYING = frozenset({2, 3})
GIVEN_BACK = 255
STOPPING = {"item", "_local_scalar_dense", "is_nonzero", "nonzero", "unique", "_unique2", "masked_select", "equal"}


class FakeHost:
    """Layers of known bytes; those that do not stay are gone when their block ends."""

    def __init__(self, staying: frozenset[int] = STAYING) -> None:
        self.staying = staying
        self.broken: int | None = None
        self.next = 0
        self._layers = {index: torch.full((SIZE,), index, dtype=torch.uint8) for index in INDICES}

    @contextmanager
    def layer(self, index: int) -> Iterator[torch.Tensor]:
        if index == self.broken:
            raise StreamError(f"layer {index} is broken")
        assert INDICES[self.next % len(INDICES)] == index
        data = self._layers[index] if index in self.staying else self._layers[index].clone()
        yield data
        self.next += 1
        if index not in self.staying:
            data.fill_(GIVEN_BACK)

    def stays(self, index: int) -> bool:
        return index in self.staying

    def restart(self) -> None:
        self.next = 0


@contextmanager
def ring_over(host: FakeHost, num_slabs: int, seed: int = 0) -> Iterator[tuple[DeviceRing, FakeStreams]]:
    streams = FakeStreams(seed)
    try:
        with DeviceRing(INDICES, [SIZE] * len(INDICES), host, streams, num_slabs) as ring:
            yield ring, streams
    finally:
        streams.close()


def sweep(ring: DeviceRing, streams: FakeStreams, until: int = len(INDICES)) -> list[bool]:
    """Queues a sweep; whether each layer had its bytes, at the beginning and at the end of what is computed on it."""
    right: list[bool] = []
    for index in INDICES[:until]:
        with ring.layer(index) as slab:
            for _ in range(2):
                streams.compute(lambda slab=slab, index=index: right.append(bool((slab == index).all())))
    return right


@pytest.mark.parametrize("num_slabs", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(6))
def test_every_layer_is_complete_while_it_is_used(num_slabs: int, seed: int) -> None:
    with ring_over(FakeHost(), num_slabs, seed) as (ring, streams):
        sweeps = [sweep(ring, streams) for _ in range(8)]
        streams.compute_event().synchronize()
        assert sweeps == [[True] * 2 * len(INDICES)] * 8


def test_a_sweep_is_queued_without_waiting_for_the_device() -> None:
    """The device does nothing at all until the whole sweep is queued."""
    with ring_over(FakeHost(staying=frozenset(INDICES)), 2) as (ring, streams):
        streams.hold(True)
        right = sweep(ring, streams)
        assert not right
        streams.hold(False)
        streams.compute_event().synchronize()
        assert right == [True] * 2 * len(INDICES)


def test_copies_run_ahead_of_the_next_sweep_as_far_as_there_are_slabs() -> None:
    with ring_over(FakeHost(), 3) as (ring, streams):
        sweep(ring, streams)
        until_carried(ring, (len(INDICES) + 3) * SIZE)  # the slabs that are free are filled without anyone asking
        figures = ring.figures()
        assert figures.link_bytes == (len(INDICES) + 3) * SIZE
        assert figures.link_ns == (len(INDICES) + 3) * 1_000_000
        assert figures.wait_ns == len(INDICES) * 1_000_000


def test_an_error_of_the_host_reaches_the_sweep_and_ends_with_its_cause() -> None:
    host = FakeHost()
    with ring_over(host, 2) as (ring, streams):
        host.broken = 3
        for _ in range(2):
            with pytest.raises(StreamError, match="layer 3 is broken"):
                sweep(ring, streams)
            ring.restart()
        host.broken = None
        ring.restart()
        right = sweep(ring, streams)
        streams.compute_event().synchronize()
        assert right == [True] * 2 * len(INDICES)


def test_an_error_of_a_queued_copy_is_raised_by_the_next_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's ring stood still at that layer, and the sweep reported that layers are taken in order."""
    host = FakeHost()
    with monkeypatch.context() as broken, ring_over(host, 3) as (ring, streams):
        broken.setattr(FakeEvent, "synchronize", fail)
        ring.restart()
        with ring.layer(INDICES[0]):
            pass
        with pytest.raises(StreamError, match="the device fails"), ring.layer(INDICES[1]):
            pass
        assert {str(queued.exception(20)) for queued, _ in ring._copies} == {"the device fails"}, "nor is one behind it"
        broken.undo()
        ring.restart()
        right = sweep(ring, streams)
        streams.compute_event().synchronize()
        assert right == [True] * 2 * len(INDICES)


def test_after_a_failed_restart_nobody_waits_and_the_next_one_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that were cancelled never end: a layer of theirs was waited for without end."""
    host = FakeHost()
    with ring_over(host, 3) as (ring, streams):
        with monkeypatch.context() as broken:
            broken.setattr(host, "restart", fail)
            with pytest.raises(StreamError, match="the device fails"):
                ring.restart()
        with pytest.raises(StreamError, match="could not be restarted"), ring.layer(INDICES[0]):
            pass
        ring.restart()
        right = sweep(ring, streams)
        streams.compute_event().synchronize()
        assert right == [True] * 2 * len(INDICES)


def fail(*_: object) -> None:
    raise StreamError("the device fails")


@pytest.mark.parametrize("seed", range(4))
def test_an_abandoned_sweep_leaves_no_trace(seed: int) -> None:
    """What it has queued may still be computed when the next one begins, from slabs that must not be written then."""
    with ring_over(FakeHost(), 2, seed) as (ring, streams):
        for given_up_at in range(len(INDICES)):
            parts = sweep(ring, streams, given_up_at)
            ring.restart()
            whole = sweep(ring, streams)
            ring.restart()
            streams.compute_event().synchronize()
            assert parts == [True] * 2 * given_up_at
            assert whole == [True] * 2 * len(INDICES)


def test_a_ring_can_end_with_outstanding_copies() -> None:
    with ring_over(FakeHost(), 2) as (ring, streams), ring.layer(INDICES[0]):
        streams.hold(True)
        threading.Timer(0.05, streams.hold, [False]).start()
    assert not any(thread.is_alive() for thread in ring._thread._threads)


@pytest.mark.parametrize(
    ("max_resident", "host_layers", "by_tier"),
    [(1, 2, [1, 0, 3]), (0, 3, [0, 1, 3]), (1, 3, [1, 3, 0]), (4, 0, [4, 0, 0])],
)
def test_three_tiers_give_the_bits_of_two(
    tmp_path: Path, max_resident: int, host_layers: int, by_tier: list[int]
) -> None:
    """Layers on the device, in the host's memory and on disk, in one model."""
    folder, tokens = save_model(tmp_path / "model", TINY), [5, 6, 7, 8]
    with streamed(folder, torch.bfloat16) as model:
        wanted = plain_logits(model, tokens)
    with streamed(folder, torch.bfloat16, 16, max_resident, InlineStreams(), host_layers) as model:
        placement = model.tiers.placement
        assert [len(placement.layers(tier)) for tier in (Tier.RESIDENT, Tier.HOST, Tier.DISK)] == by_tier
        for mine, theirs in zip(plain_logits(model, tokens), wanted, strict=True):
            assert torch.equal(mine, theirs)
        assert model.tiers.figures().link_bytes >= len(tokens) * placement.link_bytes


class Recorded(EagerMode):
    """Remembers which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.overloadpacket).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bits", [0, 4])
def test_a_layer_reads_no_number_from_the_device(tiny: Path, tmp_path: Path, bits: int) -> None:
    """Every transfer to the host stops the sweep, and the link after it. In float16 products are torch's."""
    folder = tiny
    if bits:
        folder = tmp_path / "packed"
        pack(tiny, bits, folder)
    with streamed(folder, torch.float16, streams=InlineStreams(), host_layers=4) as model:
        slot = new_slot(model)
        batch = Batch([Segment.context(slot, 0, [1, 2]), Segment.tree(slot, 2, Tree.root(3))], model.rows, model.device)
        with Recorded() as recorded:
            model.sweep(batch)
    assert "linear" in recorded.names
    assert not recorded.names & STOPPING
