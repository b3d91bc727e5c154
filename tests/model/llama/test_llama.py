"""Layers of a draft that are compiled whole, against the same model as transformers runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GemmaConfig

from bough.model.backend import backend_of, load
from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.kv.session_kv import KVSlot
from bough.model.loading.loading import build_skeleton
from bough.model.running.runner import ResidentModel
from loadtest.common.tiny_model import TINY, save_model
from tests.fakes.model.llama import CONTEXT, FAMILIES, SIZES, TREE, perturbed
from tests.fakes.models import CPU


def logits_of(folder: Path, dtype: torch.dtype, fused: bool, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Of two sessions' trees in one batch, after contexts of different length; (14, vocab_size)."""
    skeleton = build_skeleton(Checkpoint.open(folder), dtype)
    assert backend_of(CPU).compiles(skeleton) or not fused
    with monkeypatch.context() as patch:
        patch.setattr(backend_of(CPU), "compiles", lambda _: fused)
        model = ResidentModel(skeleton, CPU)
    slots = [KVSlot(skeleton.kv_shape(), 120, CPU) for _ in range(2)]
    for slot in slots:
        slot.keys.fill_(float("nan"))  # what was never written must not be read
        slot.values.fill_(float("nan"))
    first, second = len(CONTEXT), 33
    assert len(model.logits(Batch([Segment.context(slots[0], 0, CONTEXT)], None, CPU))) == 0
    together = [
        Segment.tree(slots[0], first, TREE),
        Segment.context(slots[1], 0, CONTEXT[:second]),
        Segment.tree(slots[1], second, TREE),
    ]
    return model.logits(Batch(together, None, CPU)).clone()


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_are_as_near_the_truth_as_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm, bias, window or half of a rotary embedding left out would put it many times further away."""
    folder = perturbed(tmp_path, family)
    truth = logits_of(folder, torch.float32, False, monkeypatch)
    usual = logits_of(folder, torch.bfloat16, False, monkeypatch)
    fused = logits_of(folder, torch.bfloat16, True, monkeypatch)
    assert (fused - truth).abs().mean() < 1.25 * (usual - truth).abs().mean()


def test_other_architectures_and_data_types_go_by_way_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path, GemmaConfig(**SIZES, head_dim=16))
    skeleton = build_skeleton(Checkpoint.open(folder), torch.bfloat16)
    assert not backend_of(CPU).compiles(skeleton)
    slot = KVSlot(skeleton.kv_shape(), 20, CPU)
    logits = ResidentModel(skeleton, CPU).logits(Batch([Segment.tree(slot, 0, TREE)], None, CPU))
    assert logits.shape == (len(TREE), SIZES["vocab_size"])
    wide = build_skeleton(Checkpoint.open(save_model(tmp_path / "l", TINY)), torch.float32)
    assert not backend_of(CPU).compiles(wide)
    assert not load("triton").compiles(build_skeleton(Checkpoint.open(tmp_path / "l"), torch.bfloat16))
