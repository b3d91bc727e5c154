"""A draft's steps on the pretended device: what is captured asks nothing of the host, and is right when replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bough.model.batch.batch import Batch
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.loading.loading import build_skeleton
from bough.model.running.cuda_graphs import Captured
from bough.model.running.runner import ResidentModel
from tests.conftest import save_model
from tests.fakes.models import CPU
from tests.fakes.pretend import device, notes, pretending
from tests.model.test_graphs import batch_of, run_again, slots_in
from tests.model.test_reproducible import FAMILIES

SIZES = ((5, 0), (1, 30), (20, 20), (0, 1))


def captured(act: Callable[[], torch.Tensor]) -> Captured:
    """As a graph: what would stop or send is refused when it is captured."""
    notes.is_capturing = True
    try:
        return run_again(act)
    finally:
        notes.is_capturing = False


def logits_of(folder: Path, where: torch.device, has_graphs: bool) -> list[torch.Tensor]:
    """Of a few batches of two sessions."""
    model = ResidentModel(build_skeleton(Checkpoint.open(folder), torch.float32), where)
    memory = model.skeleton.kv_shape().empty(300, where)
    slots = slots_in(model, memory)
    model.warm_up(memory, captured if has_graphs else None)
    assert model.is_graphed == has_graphs
    found = []
    for sizes in SIZES:
        batch = Batch(batch_of(slots, sizes).segments, None, where)
        notes.clear()
        found.append(model.logits(batch).cpu())
        if has_graphs:
            assert len(notes.sends) <= 1 + (not batch.all_want_logits), "its inputs, at once, and which rows are wanted"
            assert len(notes.stops) == 1, "what was asked for above"
        for segment in batch.segments:
            if not segment.wants_logits:
                segment.slot.compact(segment.rows.tolist(), segment.tokens.tolist())
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2, soft-capping, alternating windows"])
def test_steps_are_captured_and_right(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", FAMILIES[family])
    wanted = logits_of(folder, CPU, has_graphs=False)
    with pretending():
        found = logits_of(folder, device(), has_graphs=True)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4)
