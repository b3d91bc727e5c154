"""Whole sweeps on the pretended device with each of a GPU's backends, which must all give the reference's bits.

Every product and every attention rounds once there, from sums in float64, so that the order of sums does not matter.
What remains is what each backend makes of rows, padding, layouts and packed weights. On a GPU sums are in float32, in
another order with each backend.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bough.model.backend import RUNGS, computing_by
from loadtest.common.tiny_model import save_model
from tests.fakes.gpu.device_sweeps import Where, on_device
from tests.fakes.model.families import FAMILIES
from tests.fakes.model.packed_files import packed_as

KINDS = ("dense", "packed", "mixture")


def folder_of(kind: str, tiny: Path, to: Path) -> Path:
    if kind == "packed":
        return packed_as("compressed-tensors", tiny, to / "packed", 4)
    return save_model(to / "mixture", FAMILIES["qwen2 moe, shared expert"]) if kind == "mixture" else tiny


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sweeps_equal_the_references_with_every_backend(kind: str, tiny: Path, tmp_path: Path) -> None:
    folder, found = folder_of(kind, tiny, tmp_path), {}
    for rung in RUNGS:
        with computing_by(rung):
            found[rung] = on_device(folder, Where(), torch.bfloat16)
    for rung in RUNGS[:-1]:
        assert torch.equal(found[rung], found["reference"]), rung
