"""The ring of layers from disk: right bytes in order across sweeps, errors and restarts, and bytes counted once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bough.errors import StreamError
from bough.model.checkpoint.container import TensorPlace
from bough.protocol.messages import Timings
from target_worker.link.device_ring import DeviceRing
from target_worker.link.direct_io import Disk
from target_worker.link.host_layers import Ring
from target_worker.link.layer_extents import ALIGNMENT, Extent, LayerExtents
from target_worker.link.link_stats import BestSpeed, DiskStats

NUM_LAYERS = 5
LAYER_BYTES = 3 * 1024 * 1024 + 777  # several pieces, and an end that is not aligned


@pytest.fixture
def layers(tmp_path: Path) -> list[LayerExtents]:
    """Layers in two files, each of two extents, with known bytes."""
    result = []
    for index in range(NUM_LAYERS):
        file = tmp_path / f"{index % 2}.bin"
        offset = file.stat().st_size if file.exists() else 0
        with file.open("ab") as stream:
            stream.write(content(index))
            stream.write(b"\0" * (-stream.tell() % ALIGNMENT))
        aligned = -(-LAYER_BYTES // ALIGNMENT) * ALIGNMENT
        first = 1024 * 1024
        extents = (
            Extent(file, offset, first, first, 0),
            Extent(file, offset + first, aligned - first, LAYER_BYTES - first, first),
        )
        result.append(LayerExtents(f"layer {index}", extents, (), {}, aligned))
    return result


def content(index: int) -> bytes:
    return np.random.default_rng(index).bytes(LAYER_BYTES)


@contextmanager
def ring_over(layers: list[LayerExtents], num_slabs: int, num_threads: int) -> Iterator[Ring]:
    disk = Disk(extent.file for layer in layers for extent in layer.extents)
    try:
        with Ring(layers, disk, num_slabs, num_threads) as ring:
            yield ring
    finally:
        disk.close()


def until_carried(ring: Ring | DeviceRing, num_bytes: int) -> None:
    """Wait for what a ring does ahead, asleep, as its threads need turns."""
    deadline = time.monotonic() + 20
    while (so_far := ring.figures().link_bytes) < num_bytes:
        assert time.monotonic() < deadline, f"only {so_far} of {num_bytes} bytes came"
        time.sleep(0.001)


def check_sweep(ring: Ring) -> None:
    for index in range(NUM_LAYERS):
        with ring.layer(index) as slab:
            assert slab.numpy()[:LAYER_BYTES].tobytes() == content(index)


@pytest.mark.parametrize("num_slabs", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("num_threads", [1, 4])
def test_layers_arrive_complete_and_in_order(layers: list[LayerExtents], num_slabs: int, num_threads: int) -> None:
    with ring_over(layers, num_slabs, num_threads) as ring:
        for _ in range(3):
            check_sweep(ring)


@pytest.mark.parametrize("num_slabs", [1, 2, 4])
def test_reading_runs_ahead_of_the_next_sweep_as_far_as_there_are_slabs(
    layers: list[LayerExtents], num_slabs: int
) -> None:
    with ring_over(layers, num_slabs, num_threads=2) as ring:
        check_sweep(ring)
        num_bytes = (NUM_LAYERS + num_slabs) * layers[0].num_bytes
        until_carried(ring, num_bytes)  # free slabs are filled without anyone asking
        before = ring.figures()
        assert before.link_bytes == num_bytes
        check_sweep(ring)
        assert ring.figures().link_ns > before.link_ns


def test_a_read_error_names_file_and_layer_and_ends_with_its_cause(layers: list[LayerExtents]) -> None:
    file = layers[3].extents[0].file
    whole = file.read_bytes()
    with ring_over(layers, num_slabs=1, num_threads=2) as ring:
        check_sweep(ring)
        os.truncate(file, layers[3].extents[1].offset)
        for _ in range(2):
            with pytest.raises(StreamError, match=rf"{file.name}: layer 3, tensor padding, byte .*ends here"):
                check_sweep(ring)
            ring.restart()
        file.write_bytes(whole)
        check_sweep(ring)


def test_an_abandoned_sweep_leaves_no_trace(layers: list[LayerExtents]) -> None:
    with ring_over(layers, num_slabs=3, num_threads=3) as ring:
        for given_up_at in range(NUM_LAYERS):
            for index in range(given_up_at):
                with ring.layer(index):
                    pass
            ring.restart()
            check_sweep(ring)


@pytest.mark.parametrize("which", [0, 1])
def test_an_unreadable_file_is_named_with_its_tensor_until_it_can_be_read(
    layers: list[LayerExtents], which: int
) -> None:
    """The kernel itself refuses: the descriptor that the ring reads from becomes one for writing only."""
    file = layers[which].extents[0].file
    named = [replace(layer, begins={whole_extent(e, layer.name): 0 for e in layer.extents}) for layer in layers]
    with ring_over(named, num_slabs=2, num_threads=2) as ring:
        check_sweep(ring)
        descriptor = ring._disk._files[file].descriptor
        readable, unreadable = os.dup(descriptor), os.open(file, os.O_WRONLY)
        os.dup2(unreadable, descriptor)
        message = rf"{file.name}: layer (\d), tensor weights of layer \1, byte \d+: .*Bad file descriptor"
        with pytest.raises(StreamError, match=message):
            sweep_twice(ring)
        os.dup2(readable, descriptor)
        ring.restart()
        check_sweep(ring)
        os.close(readable)
        os.close(unreadable)


def test_a_layer_that_fails_early_fails_no_earlier_layer(
    layers: list[LayerExtents], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before it have been read by then: a sweep of seconds was lost to a layer of the next one."""
    with ring_over(layers, num_slabs=NUM_LAYERS, num_threads=2) as ring:
        until_carried(ring, NUM_LAYERS * layers[0].num_bytes)
        with monkeypatch.context() as broken:
            read, disk = ring._disk.read, ring._disk
            broken.setattr(
                disk, "read", lambda layer, *rest: fail(layer) if layer in layers[2:4] else read(layer, *rest)
            )
            check_sweep(ring)
            until_carried(ring, 2 * NUM_LAYERS * layers[0].num_bytes)
        for index in range(2):
            with ring.layer(index):
                pass
        with pytest.raises(StreamError, match="layer 2 is broken"), ring.layer(2):
            pass
        ring.restart()
        check_sweep(ring)


def fail(layer: LayerExtents) -> None:
    raise StreamError(f"{layer.name} is broken")


def whole_extent(extent: Extent, name: str) -> TensorPlace:
    return TensorPlace(f"weights of {name}", extent.file, extent.offset, extent.num_bytes, "U8", (extent.num_bytes,))


def sweep_twice(ring: Ring) -> None:
    """Some layers have been read ahead."""
    check_sweep(ring)
    check_sweep(ring)


def test_the_page_cache_is_used_if_direct_reads_are_refused(
    layers: list[LayerExtents], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_open = os.open

    def refuse(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    with ring_over(layers, num_slabs=2, num_threads=2) as ring:
        assert "refuses O_DIRECT" in caplog.text
        check_sweep(ring)


def test_overlapping_reading_times_count_once() -> None:
    traffic, began = DiskStats(), time.perf_counter_ns()
    with traffic.reading(7):
        with traffic.reading(5):
            time.sleep(0.02)
        under_way = traffic.figures(0)
        assert under_way.link_bytes == 5
        assert 20_000_000 <= under_way.link_ns <= time.perf_counter_ns() - began
    ended, elapsed = traffic.figures(3), time.perf_counter_ns() - began
    assert (ended.link_bytes, ended.wait_ns) == (12, 3)
    assert ended.link_ns <= elapsed
    time.sleep(0.01)
    assert traffic.figures(3) == ended


def test_a_few_bytes_are_no_measurement_of_the_link() -> None:
    """100 bytes in 100 ns, then 50 that had begun long before; the best counts over 100 bytes and more."""
    best = BestSpeed(Timings(link_bytes=0, link_ns=0), least_bytes=100)
    assert best.seen(Timings(link_bytes=0, link_ns=0)) == 0
    assert best.seen(Timings(link_bytes=50, link_ns=100)) == 0.5  # as far as it is known
    assert best.seen(Timings(link_bytes=100, link_ns=100)) == 1.0
    assert best.seen(Timings(link_bytes=150, link_ns=101)) == 1.0
    assert best.seen(Timings(link_bytes=300, link_ns=200)) == 2.0
    assert best.seen(Timings(link_bytes=400, link_ns=400)) == 2.0
