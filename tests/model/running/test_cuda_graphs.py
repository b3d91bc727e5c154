"""Draft steps from inputs that stay in place: what a CUDA graph replays, here run again instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch.torch_version import TorchVersion

from bough.model.architecture import architecture
from bough.model.backend import load
from bough.model.backends import triton
from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.kv.session_kv import KVArena, KVMemory, KVSlot
from bough.model.loading.loading import build_skeleton
from bough.model.running.runner import (
    ROWS,
    TAIL_WIDTH,
    Captured,
    CaptureFailed,
    GpuCapture,
    GraphedSteps,
    ResidentModel,
    graphed_steps,
)
from bough.trees.tree import Tree
from loadtest.gpu.reference import kernels_by_torch
from tests.fakes.model.families import random_tree
from tests.fakes.models import CPU


def run_again(act: Callable[[], torch.Tensor]) -> Captured:
    """In place of a graph: does the same from the same inputs, and puts the result in the same place."""
    result = act().clone()

    def replay() -> None:
        result.copy_(act())

    return Captured(replay, result)


@pytest.fixture
def model(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> ResidentModel:
    """In float32: in bfloat16 it would be one that is compiled whole, on the CPU."""
    monkeypatch.setattr(triton, "kernels", kernels_by_torch)
    monkeypatch.setattr(architecture, "backend_of", lambda _: load("triton"))  # a captured step attends as on a GPU
    return ResidentModel(build_skeleton(Checkpoint.open(tiny), torch.float32), CPU)


def memory_of(model: ResidentModel, num_rows: int = 300) -> KVMemory:
    return model.skeleton.kv_shape().empty(num_rows, CPU)


@torch.inference_mode()
def steps_over(model: ResidentModel, memory: KVMemory) -> GraphedSteps:
    return GraphedSteps(model.skeleton, memory, CPU, run_again)


def slots_in(model: ResidentModel, memory: KVMemory) -> list[KVSlot]:
    arena = KVArena(model.skeleton.kv_shape(), memory)
    return [arena.take(120), arena.take(140)]


def batch_of(slots: list[KVSlot], sizes: tuple[int, int]) -> Batch:
    """This many tokens of each session: half of them context, the others a tree."""
    segments = []
    for slot, size in zip(slots, sizes, strict=True):
        context = [token % 90 for token in range(size // 2)]
        segments.append(Segment.context(slot, slot.length, context))
        if size:
            tree = random_tree(np.random.default_rng(size), size - len(context), root=3)
            segments.append(Segment.tree(slot, slot.length + len(context), tree))
    return Batch(segments, None, CPU)


@torch.inference_mode()
def test_a_replayed_step_equals_the_step(model: ResidentModel) -> None:
    """Sessions side by side, in steps padded to several sizes, against what runs on the CPU otherwise."""
    graphed, plain = (slots_in(model, memory_of(model)) for _ in range(2))
    steps = steps_over(model, graphed[0].memory)
    for sizes in ((5, 0), (1, 30), (1, 1), (0, 70), (20, 20), (0, 1), (60, 68)):
        mine, theirs = batch_of(graphed, sizes), batch_of(plain, sizes)
        assert steps.has(mine)
        torch.testing.assert_close(steps.logits(mine), model.logits(theirs), atol=2e-4, rtol=1e-4)
        for batch in (mine, theirs):
            for segment in batch.segments:
                if not segment.wants_logits:
                    segment.slot.compact(segment.rows.tolist(), segment.tokens.tolist())
    for mine_held, theirs_held in zip(graphed, plain, strict=True):
        held = slice(0, mine_held.length)
        for mine_rows, theirs_rows in ((mine_held.keys, theirs_held.keys), (mine_held.values, theirs_held.values)):
            torch.testing.assert_close(mine_rows[:, held], theirs_rows[:, held], atol=2e-4, rtol=1e-4)


def test_padding_writes_to_no_sessions_rows(model: ResidentModel) -> None:
    slots = slots_in(model, memory_of(model))
    steps = steps_over(model, slots[0].memory)
    slots[0].memory.keys.fill_(7.0)
    batch = Batch([Segment.tree(slots[1], 5, Tree.of([1, 2, 3], [-1, 0, 0], [0.0] * 3))], None, CPU)
    with torch.inference_mode():
        steps.logits(batch)
    written = (slots[0].memory.keys != 7.0).any(dim=(0, 2, 3)).nonzero().ravel().tolist()
    assert written == [slots[1].begin + row for row in (5, 6, 7)]


def test_steps_that_were_not_captured_run_without_a_graph(model: ResidentModel) -> None:
    """Too many rows, too deep a tree, and sessions in other memory."""
    slots = slots_in(model, memory_of(model))
    steps = steps_over(model, slots[0].memory)
    chain = Tree.of([1] * (TAIL_WIDTH + 1), [*range(-1, TAIL_WIDTH)], [0.0] * (TAIL_WIDTH + 1))
    long_prompt = Segment.context(slots[0], 0, [1] * 100), Segment.context(slots[1], 0, [1] * (ROWS[-1] - 99))
    elsewhere = KVSlot(model.skeleton.kv_shape(), 10, CPU)
    assert not steps.has(Batch(long_prompt, None, CPU))
    assert not steps.has(Batch([Segment.tree(slots[0], 0, chain)], None, CPU))
    assert not steps.has(Batch([Segment.tree(elsewhere, 0, Tree.root(1))], None, CPU))
    assert steps.has(Batch([Segment.tree(slots[0], 0, Tree.root(1))], None, CPU))


def test_every_device_is_captured_in_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's default stream for captures is made once in a process: on the second GPU it would capture nothing."""
    streams, graph = [MagicMock(name="cuda:0"), MagicMock(name="cuda:1")], MagicMock()
    monkeypatch.setattr(torch.cuda, "Stream", MagicMock(side_effect=streams))
    for name in ("CUDAGraph", "current_stream", "set_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "graph", graph)
    for capture in (GpuCapture(), GpuCapture()):
        for _ in range(2):
            capture(lambda: torch.zeros(1))
    assert [call.args[2] for call in graph.call_args_list] == [streams[0]] * 2 + [streams[1]] * 2


def test_steps_run_without_graphs_if_capture_is_impossible(
    model: ResidentModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Here for want of CUDA."""
    assert graphed_steps(model.skeleton, memory_of(model), CPU, GpuCapture()) is None
    assert "no CUDA graph could be captured" in caplog.text


def test_no_step_runs_after_a_failed_capture_of_an_old_torch(
    model: ResidentModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its allocator believes that the capture continues, and fails later, far from the cause."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1+cu130"))
    with pytest.raises(CaptureFailed, match=r"^no CUDA graph could be captured on cpu: "):
        model.warm_up(memory_of(model), GpuCapture())
    model.warm_up(memory_of(model), GpuCapture(), is_captured=False)
    assert not model.is_graphed
