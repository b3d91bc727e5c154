"""Layers that targets and drafts on the CPU run compiled whole, against the same model as transformers runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config

from bough.errors import StreamError
from bough.model.backend import backend_of, load
from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.cpu.linear import can_multiply
from bough.model.kv.session_kv import KVShape, KVSlot
from bough.model.loading.loading import build_skeleton
from bough.model.running.runner import ResidentModel
from loadtest.common.inline_streams import InlineStreams
from loadtest.common.packed_model import pack
from loadtest.common.tiny_model import TINY, save_model
from target_worker.sweep import streamed_model
from tests.fakes.model.llama import CONTEXT, FAMILIES, SIZES, TREE, perturbed
from tests.fakes.models import CPU, new_slot, plain_logits, streamed

pytestmark = pytest.mark.skipif(
    not can_multiply(64, torch.bfloat16), reason="this processor has no products of single rows in bfloat16"
)


def sessions(shape: KVShape) -> tuple[list[Segment], list[Segment]]:
    """A context, then the trees of two sessions in one batch, after contexts of different length."""
    slots = [KVSlot(shape, 400, CPU) for _ in range(2)]
    for slot in slots:
        slot.keys.fill_(float("nan"))  # what was never written must not be read
        slot.values.fill_(float("nan"))
    together = [
        Segment.tree(slots[0], 4 * len(CONTEXT), TREE),
        Segment.context(slots[1], 0, CONTEXT[:33]),
        Segment.tree(slots[1], 33, TREE),
    ]
    return [Segment.context(slots[0], 0, CONTEXT * 4)], together


def logits_of_target(folder: Path, dtype: torch.dtype, is_compiled: bool) -> torch.Tensor:
    """(14, vocab_size); the context is in several chunks."""
    with streamed(folder, dtype) as model:
        assert model.arithmetic.endswith("compiled whole") == is_compiled
        context, trees = sessions(model.skeleton.kv_shape())
        model.sweep(Batch(context, model.rows, CPU))
        return model.sweep(Batch(trees, model.rows, CPU))[0].float()


def logits_of_draft(folder: Path, dtype: torch.dtype, is_compiled: bool) -> torch.Tensor:
    """(14, vocab_size)."""
    skeleton = build_skeleton(Checkpoint.open(folder), dtype)
    assert backend_of(CPU).compiles(skeleton) == is_compiled
    model = ResidentModel(skeleton, CPU)
    context, trees = sessions(skeleton.kv_shape())
    assert len(model.logits(Batch(context, None, CPU))) == 0
    return model.logits(Batch(trees, None, CPU)).float()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("logits_of", "most"), [(logits_of_target, 1.0), (logits_of_draft, 1.25)])
def test_compiled_layers_are_as_exact_as_transformers(
    family: str, logits_of: Callable[..., torch.Tensor], most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm, bias, window or half of a rotary embedding left out would put them many times further away."""
    folder = perturbed(tmp_path, family)
    mine = logits_of(folder, torch.bfloat16, True)
    monkeypatch.setattr(backend_of(CPU), "compiles", lambda _: False)
    truth, usual = (logits_of(folder, dtype, False) for dtype in (torch.float32, torch.bfloat16))
    assert (mine - truth).abs().mean() < most * (usual - truth).abs().mean()


def test_packed_weights_pass_through_scratch_memory(tmp_path: Path) -> None:
    """A layer's values are then where the next one's will be: nothing of them may be kept."""
    folder = save_model(tmp_path / "model", TINY)
    pack(folder, 8, tmp_path / "packed")
    with streamed(tmp_path / "packed", torch.bfloat16) as model, streamed(folder, torch.bfloat16) as whole:
        assert model.arithmetic == whole.arithmetic
        mine, theirs = (torch.stack(plain_logits(each, CONTEXT[:9])).float() for each in (model, whole))
    assert (mine - theirs).abs().mean() < 0.05 * theirs.std()


def test_other_architectures_devices_and_data_types_use_transformers(tmp_path: Path) -> None:
    other, llama = save_model(tmp_path / "gemma", Gemma2Config(**SIZES, head_dim=16)), save_model(tmp_path / "l", TINY)
    with streamed(other, torch.bfloat16) as model:
        assert model.arithmetic == "products of single rows"
    assert logits_of_draft(other, torch.bfloat16, False).shape == (2 * len(TREE), SIZES["vocab_size"])
    assert not backend_of(CPU).compiles(build_skeleton(Checkpoint.open(llama), torch.float32))
    assert not load("triton").compiles(build_skeleton(Checkpoint.open(llama), torch.bfloat16))


@pytest.mark.parametrize("staged_rows", [0, 400])
def test_a_failed_sweep_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staged_rows: int) -> None:
    """In a layer that could not be read; keys and values in place, and coming with their layer."""
    folder = save_model(tmp_path / "model", TINY)
    with streamed(folder, torch.bfloat16, streams=InlineStreams(), host_layers=9, staged_rows=staged_rows) as model:
        slot, real = new_slot(model), model.tiers.layer
        batch = Batch([Segment.context(slot, 0, CONTEXT), Segment.tree(slot, len(CONTEXT), TREE)], model.rows, CPU)
        wanted = model.sweep(batch)[0].clone()

        @contextmanager
        def broken(index: int) -> Iterator[torch.Tensor]:
            with real(index) as slab:
                if index == 2:
                    raise StreamError("layer 2 is broken")
                yield slab

        other = Batch([Segment.tree(new_slot(model), 0, TREE)], model.rows, CPU)
        with monkeypatch.context() as patch:
            patch.setattr(model.tiers, "layer", broken)
            with pytest.raises(StreamError, match="layer 2 is broken"):
                model.sweep(other)
        again = Batch([Segment.context(slot, 0, CONTEXT), Segment.tree(slot, len(CONTEXT), TREE)], model.rows, CPU)
        assert torch.equal(model.sweep(again)[0], wanted)


def test_weights_are_found_again_without_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More layers in more slabs than are remembered."""
    folder = save_model(tmp_path / "model", TINY)
    with streamed(folder, torch.bfloat16) as model:
        wanted = plain_logits(model, CONTEXT[:5])
    monkeypatch.setattr(streamed_model, "MOST_CACHED", 1)
    with streamed(folder, torch.bfloat16) as model:
        assert all(torch.equal(*pair) for pair in zip(plain_logits(model, CONTEXT[:5]), wanted, strict=True))
