"""A draft's steps on the pretended device: what is captured asks nothing of the host, and is right when replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bough.cli.machine.memory_division import draft_needs
from bough.config.processes import DraftConfig, parse
from bough.errors import ConfigError
from bough.model.batch.batch import Batch
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.loading.loading import build_skeleton
from bough.model.running import runner
from bough.model.running.runner import Captured, ResidentModel
from draft_worker.model.sources import with_weights
from loadtest.common.packed_model import pack
from loadtest.common.tiny_model import save_model
from tests.fakes.gpu.pretend import device, notes, pretending
from tests.fakes.model.families import FAMILIES, KINDS, MIXTURES, of_two_layers
from tests.fakes.model.packed_files import packed_as
from tests.fakes.models import CPU
from tests.fakes.tiers import long_but
from tests.model.running.test_cuda_graphs import batch_of, run_again, slots_in

SIZES = ((5, 0), (1, 30), (20, 20), (0, 1))
RECURRENT = "qwen3.5, recurrent layers"
OTHERS = [name for name in FAMILIES if "recurrent" not in name]


def captured(act: Callable[[], torch.Tensor]) -> Captured:
    """As a graph: what would stop or send is refused when it is captured."""
    notes.is_capturing = True
    try:
        return run_again(act)
    finally:
        notes.is_capturing = False


def logits_of(folder: Path, where: torch.device, has_graphs: bool, stays_packed: bool = False) -> list[torch.Tensor]:
    """Of a few batches of two sessions."""
    skeleton = build_skeleton(Checkpoint.open(folder), torch.float32)
    model = ResidentModel(skeleton, where, stays_packed=stays_packed)
    memory = model.skeleton.kv_shape().empty(300, where)
    slots = slots_in(model, memory)
    model.warm_up(memory, captured if where != CPU else None)
    assert model.is_graphed == has_graphs
    found = []
    for sizes in SIZES:
        batch = Batch(batch_of(slots, sizes).segments, None, where)
        notes.clear()
        found.append(model.logits(batch).cpu())
        assert "mean" not in notes.launches, "norms are the backend's, in one launch each"
        if has_graphs:
            assert len(notes.sends) <= 1 + (not batch.all_want_logits), "its inputs, at once, and which rows are wanted"
            assert len(notes.stops) == 1, "what was asked for above"
        for segment in batch.segments:
            if not segment.wants_logits:
                segment.slot.compact(segment.rows.tolist(), segment.tokens.tolist())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", [*long_but(KINDS[:-1], OTHERS), RECURRENT])
def test_steps_are_captured_correctly(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for mixtures', whose experts wait for what their router says, and recurrent ones, whose steps are others each
    time: these are launched kernel by kernel.
    """
    monkeypatch.setattr(runner, "ROWS", (8, 64))  # the others' sizes are captured below
    folder = save_model(tmp_path / "model", of_two_layers(family))
    wanted = logits_of(folder, CPU, has_graphs=False)
    with pretending():
        found = logits_of(folder, device(), has_graphs=family not in (*MIXTURES, RECURRENT))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", long_but(["compressed-tensors"], ["compressed-tensors", "gptq", "awq"]))
def test_a_packed_draft_has_the_same_logits_on_each_gpu_packed_or_unpacked(
    method: str, tiny: Path, tmp_path: Path
) -> None:
    """A kernel is launched on the current GPU, so the GPU of the weights must be current while they are loaded."""
    folder = packed_as(method, tiny, tmp_path / "packed")
    wanted = logits_of(folder, CPU, has_graphs=False)
    with pretending():
        written = logits_of(folder, device(), True)
        others = [logits_of(folder, device(1), True, stays_packed) for stays_packed in (False, True)]
    for found, theirs in zip(written, wanted, strict=True):
        torch.testing.assert_close(found, theirs, atol=2e-4, rtol=1e-4)
    assert all(torch.equal(found, same) for other in others for found, same in zip(other, written, strict=True))


def test_few_bits_are_refused_if_unsupported(tiny: Path, tmp_path: Path) -> None:
    pack(tiny, 4, tmp_path / "packed")
    packed, plain = (build_skeleton(Checkpoint.open(f), torch.bfloat16) for f in (tmp_path / "packed", tiny))
    with pytest.raises(ConfigError, match=r"^--bits: must be auto, 8 or 16 on the CPU, got 4$"):
        with_weights(packed, CPU, "4")
    with pytest.raises(ConfigError, match=r"^--bits: must be auto or 16 for .*, which is not packed, got 4; use a"):
        with_weights(plain, torch.device("cuda", 0), "4")


def test_memory_is_used_as_bough_up_calculates(tiny: Path, tmp_path: Path) -> None:
    pack(tiny, 4, tmp_path / "packed")
    flags = "--model", str(tmp_path / "packed")
    few, many = (draft_needs(parse(DraftConfig, "t", [*flags, "--bits", bits], {})).weights for bits in ("4", "16"))
    assert few < 0.7 * many
