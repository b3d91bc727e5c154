"""What a member of a target needs follows from its own settings, and from the head's limits."""

from __future__ import annotations

import asyncio
import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.config.processes import TargetConfig, parse
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.sizes.memory_budget import fixed_bytes
from bough.model.sizes.target_limits import KVRoom
from bough.security.access import OPEN
from bough.sizing.stage_split import StageRoom
from loadtest.common.tiny_model import save_model
from target_worker.stages import stage_worker
from target_worker.stages.head import StagesHead
from target_worker.stages.measured import Needs, libraries
from target_worker.stages.ring import Ring
from target_worker.stages.roster import Assignment, JoinCall, StageFacts, StageFigures
from target_worker.sweep.held_layers import HeldLayers
from target_worker.sweep.streamed_model import StageLayers
from tests.fakes.model.families import FAMILIES

ROOM = KVRoom(1000, 3)
FACTS = StageFacts("0.1", "code", "checkpoint", "tokenizer", "float32", "cpu")


def config_of(model: Path, *flags: str) -> TargetConfig:
    flags = ("--model", str(model), "--dtype", "float32", "--max-context", "300", "--kv-memory", "1GB", *flags)
    return parse(TargetConfig, "t", flags, {})


@pytest.fixture(scope="module", params=["llama", "qwen3.5, recurrent layers"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), FAMILIES[request.param])


def test_a_stage_on_a_processor_needs_what_it_then_takes(model: Path) -> None:
    """A hybrid's needs are those of a stage with all of its recurrent layers."""
    checkpoint, spare = Checkpoint.open(str(model)), []
    whole = HeldLayers(config_of(model, "--threads", "2"), checkpoint)
    part = StageLayers(1, len(whole.layers), len(whole.layers))
    for threads in (1, 32):
        needs = Needs.of(whole, whole.config, StageRoom("b", 10**9, 1e9, 0.01, threads), ROOM, is_head=False)
        held = HeldLayers(config_of(model, "--threads", str(threads)), checkpoint, part)
        held.place(ROOM)
        spare.append(sum(needs.kv_bytes[part.first :]) + needs.buffer_bytes - held.placement.fixed.total)
    assert spare[0] == spare[1]
    assert (spare[0] > 0) == (whole.skeleton.kv_shape().states is not None)


def test_a_stage_with_kv_on_the_host_needs_little_of_its_gpu(model: Path) -> None:
    """The head is a CPU, which has no such tier."""
    whole = HeldLayers(config_of(model), Checkpoint.open(str(model)))
    needs = Needs.of(whole, whole.config, StageRoom("b", 10**9, 1e9, 0.01, kv_on_host=True), ROOM, is_head=False)
    skeleton, config = whole.skeleton, config_of(model, "--kv-tier", "host", "--threads", "1")
    scratch = max(layer.scratch_bytes(torch.float32, True) for layer in whole.layers)
    shape = skeleton.kv_shape()
    fixed = fixed_bytes(config, True, skeleton.config, shape, 0, scratch, room=ROOM, has_head=False)
    assert sum(needs.kv_bytes) + needs.buffer_bytes == fixed.total
    assert sum(needs.kv_bytes) == ROOM.num_states * shape.state_bytes


async def test_a_stage_with_many_threads_gets_fewer_layers(tiny: Path) -> None:
    """Each thread has memory for scores of its own."""
    config = config_of(tiny, "--stages", "2", "--threads", "1")
    whole = HeldLayers(config, Checkpoint.open(str(tiny)))
    sizes = []
    for threads in (1, 64):
        head, own = StagesHead(config), StageRoom("a", 10**9, 0.0, 0.01, 1)
        head.admit(FACTS)
        needs = Needs.of(whole, whole.config, own._replace(num_threads=64), ROOM, is_head=False)
        memory = needs.buffer_bytes + max(needs.kv_bytes) + max(layer.num_bytes for layer in whole.layers)
        room = StageRoom("b", memory, 0.0, 0.001, threads)
        head.roster.join(JoinCall("id", "127.0.0.1:1", FACTS, room, StageFigures()))
        split = await asyncio.to_thread(head.split, whole, own, ROOM, config)
        sizes.append(len(split.ranges[1]))
    assert sizes == [3, 1]


async def test_a_stage_says_what_it_has_loaded(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For people, and for a head that starts again."""
    monkeypatch.setattr(stage_worker, "room_of", lambda *_: StageRoom("b", 10**9, 1e9, 0.01))  # which takes seconds
    monkeypatch.setattr(HeldLayers, "devices_in_words", lambda _: "a GPU, layers [1] on another")
    ring = Ring(OPEN, is_head=False)
    worker = await asyncio.to_thread(stage_worker.StageWorker, config_of(tiny, "--backend", "reference"), ring, "b:1")
    try:
        await asyncio.to_thread(worker.load, Assignment(1, 2, 4, 700, 0, 300, 64, 256, 64))
        figures = worker.call().figures
    finally:
        await ring.close()
        await asyncio.to_thread(worker.close)
    assert figures.memory_bytes > 0
    device = "a GPU, layers [1] on another"
    assert replace(figures, memory_bytes=0) == StageFigures(2, 4, device=device, num_rows=700, max_context=300)


def test_targets_with_other_libraries_of_a_gpu_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiled the same kernel differently from version to version; pip ties it to torch, others do not."""

    class Cublas:
        def __init__(self, name: str) -> None:
            assert name == "libcublas.so.13"

        def cublasGetProperty(self, number: int, level: Any) -> int:
            level._obj.value = (13, 1, 7)[number]
            return 0

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("bough.model.running.device.version", lambda name: {"triton": "3.6.0"}[name])
    gpu = torch.device("cuda", 0)
    assert libraries(gpu).endswith(", triton 3.6.0, CUDA 13.0, cuBLAS unknown"), "there is none here"
    monkeypatch.setattr(ctypes, "CDLL", Cublas)
    assert libraries(gpu) == f"{libraries(torch.device('cpu'))}, triton 3.6.0, CUDA 13.0, cuBLAS 13.1.7"
