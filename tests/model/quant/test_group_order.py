"""GPTQ's groups of inputs, looked at when a model is opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bough.errors import CheckpointError
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.container import TensorPlace
from bough.model.loading.loading import build_skeleton
from bough.model.quant.format import PackedTensors
from bough.model.quant.gptq import Gptq
from tests.fakes.model.packed_files import in_words


def opened(folder: Path) -> list[Gptq]:
    skeleton = build_skeleton(Checkpoint.open(folder), torch.float32)
    return [slot.source for slot in skeleton.layer_slots[0] if isinstance(slot.source, Gptq)]


def changed(folder: Path, change: Callable[[torch.Tensor], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors["model.layers.0.self_attn.q_proj.g_idx"])
    save_file(tensors, file)


@pytest.mark.parametrize("is_ordered", [True, False])
def test_groups_in_order_need_not_be_looked_up(is_ordered: bool, tiny: Path, tmp_path: Path) -> None:
    """Most files name them though they are."""
    found = opened(in_words(tmp_path / "gptq", "gptq", is_ordered, tiny))
    assert len(found) == 7
    assert all((source.groups is None) == is_ordered for source in found)


@pytest.mark.parametrize("number", [-1, 2])
def test_a_group_that_is_not_there_is_refused(number: int, tiny: Path, tmp_path: Path) -> None:
    """A GPU's kernel would read beyond the table, which ends its context for good."""
    folder = in_words(tmp_path / "gptq", "gptq", False, tiny)
    changed(folder, lambda groups: groups[3:4].fill_(number))
    with pytest.raises(CheckpointError, match=rf"q_proj\.g_idx: groups must be 0 to 1, got {number}$"):
        opened(folder)


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "short"
    np.zeros(3, np.int32).tofile(file)
    with pytest.raises(CheckpointError, match="ends after 3 of 8"):
        PackedTensors({}).unless_in_order(TensorPlace("g_idx", file, 0, 32, "I32", (8,)), 1)
