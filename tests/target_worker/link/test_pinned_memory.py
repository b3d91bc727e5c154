"""The host's memory as a GPU wants it: taken by several threads, near it, pinned as far as the system allows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bough.model.batch.batch import Batch, Segment
from bough.model.kv.session_kv import KVArena, KVShape, KVSlot
from bough.runtime import host_memory
from bough.runtime.host_memory import in_pieces, large_pages, node_of, populate, prefer_node
from bough.trees.tree import Tree
from loadtest.common.inline_streams import InlineStreams
from target_worker.kv.kv_offload import memory_on_host
from target_worker.link import streams
from target_worker.link.streams import CudaStreams, PinnedMemory
from target_worker.sweep.streamed_model import StreamedModel
from tests.fakes.models import new_slot, streamed

GPU = torch.device("cuda", 0)
MEGABYTE = 1 << 20


class Cudart:
    """Refuses to pin the given pieces."""

    def __init__(self, refused: tuple[int, ...]) -> None:
        self.asked: list[int] = []
        self.unpinned: list[int] = []
        self._refused = refused

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.asked.append(address)
        return 2 if len(self.asked) - 1 in self._refused else 0

    def cudaHostUnregister(self, address: int) -> int:
        self.unpinned.append(address)
        return 0


def unlaunched(*_: object, **__: object) -> None:
    raise RuntimeError("CUDA error: that of the pinning")


@pytest.fixture
def cudart_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cudart]:
    """A CUDA that is not here."""

    def make(*refused: int, **ids: int) -> Cudart:
        cudart = Cudart(refused)
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**ids))
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(torch, "zeros", unlaunched)
        return cudart

    return make


def test_a_piece_that_cannot_be_pinned_is_used_unpinned(
    cudart_of: Callable[..., Cudart], caplog: pytest.LogCaptureFixture
) -> None:
    """It was once all or nothing, of a hundred gigabytes."""
    cudart, streams = cudart_of(1), CudaStreams(GPU)
    pieces = [streams.host_memory(size) for size in (MEGABYTE, 2 * MEGABYTE, 3 * MEGABYTE)]
    for piece in pieces:
        piece[0], piece[-1] = 1, 2
    assert streams.unpinned_bytes == 2 * MEGABYTE
    assert "2.10 MB of host memory could not be pinned (CUDA error 2)" in caplog.text
    assert all(address % 4096 == 0 for address in cudart.asked)
    streams.close()
    assert cudart.unpinned == [cudart.asked[0], cudart.asked[2]]


def test_a_copy_is_queued_within_its_own_gpu(cudart_of: Callable[..., Cudart], monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.stream` alone sets the thread's first GPU again, and CUDA makes a context there."""
    cudart_of()
    entered: list[object] = []

    def enter(what: object) -> nullcontext[None]:
        entered.append(what)
        return nullcontext()

    second, stream = torch.device("cuda", 1), SimpleNamespace(wait_event=entered.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: SimpleNamespace(record=lambda _: None))
    monkeypatch.setattr(torch.cuda, "stream", enter)
    streams = CudaStreams(second)
    monkeypatch.setattr(torch.cuda, "device", enter)
    source, target = torch.ones(2), torch.empty(2)
    streams.copy(source, target, None)
    assert entered == [second, stream]
    assert torch.equal(source, target)


def test_memory_is_allocated_near_the_gpu(
    cudart_of: Callable[..., Cudart], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:65:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    asked: list[tuple[int, int]] = []

    def prefer(memory: memoryview, node: int) -> bool:
        asked.append((len(memory), node))
        return False

    cudart_of(pci_domain_id=0, pci_bus_id=0x65, pci_device_id=0)
    monkeypatch.setattr("target_worker.link.streams.node_of", lambda address: node_of(address, tmp_path))
    monkeypatch.setattr("target_worker.link.streams.prefer_node", prefer)
    with caplog.at_level(logging.INFO):
        PinnedMemory(GPU).take(MEGABYTE)
    assert asked == [(MEGABYTE, 1)]
    assert "cuda:0 comes from any NUMA node: the system refuses to bind it to node 1" in caplog.text


@pytest.mark.parametrize("text", [None, "-1\n", "none"])
def test_a_machine_with_one_node_names_none(text: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "numa_node").write_text(text)
    assert node_of("0000:01:00.0", tmp_path) is None


def resident_bytes(memory: memoryview) -> int:
    """Of the mappings that hold `memory`: other memory of the process may be freed at any time."""
    start = np.frombuffer(memory, np.uint8).ctypes.data
    resident, is_inside = 0, False
    for first, *rest in map(str.split, Path("/proc/self/smaps").read_text().splitlines()):
        if not first.endswith(":"):
            low, high = (int(address, 16) for address in first.split("-"))
            is_inside = low < start + len(memory) and start < high
        elif is_inside and first == "Rss:":
            resident += int(rest[0]) * 1024
    return resident


@pytest.mark.parametrize("is_old", [False, True])
def test_pages_exist_before_they_are_used(is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_old`: of a system that cannot be asked for it."""
    if is_old:
        refusing = SimpleNamespace(madvise=lambda *_: -1)
        monkeypatch.setattr(host_memory, "_libc", lambda: refusing)
    memory = large_pages(150 * MEGABYTE)
    before = resident_bytes(memory)
    populate(memory, 3)
    assert resident_bytes(memory) - before > 140 * MEGABYTE
    assert not np.frombuffer(memory, np.uint8).any()


def test_memory_with_a_preferred_node_is_usable_on_any_system() -> None:
    memory = large_pages(MEGABYTE)
    assert prefer_node(memory, 0) in (True, False)
    assert prefer_node(memory, 5000) is False
    populate(memory)


@pytest.mark.parametrize(
    ("sizes", "runs"), [([], []), ([5], [[5]]), ([2, 2, 2], [[2, 2], [2]]), ([9, 1, 3, 1], [[9], [1, 3], [1]])]
)
def test_slabs_share_pieces_without_crossing_them(sizes: list[int], runs: list[list[int]]) -> None:
    assert in_pieces(sizes, 4) == runs


def test_resident_layers_are_in_pieces(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is read into them is right, which `streamed` compares."""
    asked: list[int] = []

    class Streams(InlineStreams):
        def host_memory(self, num_bytes: int) -> memoryview:
            asked.append(num_bytes)
            return large_pages(num_bytes)

    monkeypatch.setattr("target_worker.link.host_layers.PIECE_BYTES", 1)
    with streamed(tiny, torch.float32, streams=Streams(), host_layers=4) as model:
        logits = swept(model, new_slot(model))
    assert len(asked) == 4
    with streamed(tiny, torch.float32) as model:
        torch.testing.assert_close(logits, swept(model, new_slot(model)))


def test_kv_on_the_host_is_in_pieces_of_whole_layers_near_their_device(
    cudart_of: Callable[..., Cudart], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which one may be refused: it was once all or nothing."""
    shape, layer_bytes = KVShape(5, 2, 4, torch.float16), 100 * 2 * 4 * 2
    monkeypatch.setattr("target_worker.kv.kv_offload.PIECE_BYTES", 2 * layer_bytes)
    cudart, asked = cudart_of(1), list[tuple[str, int]]()
    take = PinnedMemory.take
    monkeypatch.setattr(
        PinnedMemory,
        "take",
        lambda self, num_bytes: asked.append((str(self._device), num_bytes)) or take(self, num_bytes),
    )
    first, second = CudaStreams(GPU), CudaStreams(torch.device("cuda", 1))
    memory = memory_on_host(shape, 100, first, {1: second, 3: second})
    of_one = [("cuda:0", 2 * layer_bytes), ("cuda:0", layer_bytes), ("cuda:1", 2 * layer_bytes)]
    assert asked == 2 * of_one, "keys, and values"
    assert (len(cudart.asked), first.unpinned_bytes, second.unpinned_bytes) == (6, layer_bytes, 0)
    slots = KVArena(shape, memory), KVArena(shape, shape.empty(100, torch.device("cpu")))
    mine, theirs = (arena.take(40) for arena in slots)
    for slot in (mine, theirs):
        for layer in range(5):
            slot.keys[layer, :30] = torch.arange(240.0).view(30, 2, 4) * (layer + 1)
            slot.values[layer, :30] = slot.keys[layer, :30] + 1
        slot.compact([0, 3, 7], [1, 2, 3])
        slot.move(60, 100, 3)
    for layer in range(5):
        assert torch.equal(mine.keys[layer, :3], theirs.keys[layer, :3])
        assert torch.equal(mine.values[layer, :3], theirs.values[layer, :3])


def swept(model: StreamedModel, slot: KVSlot) -> torch.Tensor:
    batch = Batch([Segment.tree(slot, 0, Tree.root(3))], model.rows, model.device)
    return model.sweep(batch)[0].clone()


def test_a_copy_is_queued_in_pieces(cudart_of: Callable[..., Cudart], monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of KV have a stream of their own but the same engine: they waited for a whole layer, up to 68 ms."""
    cudart_of()
    for name in ("Stream", "Event", "stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(streams, "PIECE_BYTES", 64)
    source, sizes = torch.arange(300, dtype=torch.int16).view(3, 100), []
    with Sizes(sizes):
        CudaStreams(GPU).copy(source, target := torch.empty_like(source), None)
    assert sizes == [64] * 9 + [24]
    assert torch.equal(target, source)


class Sizes(TorchDispatchMode):
    """Notes the bytes of every copy."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self._sizes = sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.copy_:
            self._sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))
