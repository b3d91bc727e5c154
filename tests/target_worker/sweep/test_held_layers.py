"""What a target does before it reads weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bough.config.processes import TargetConfig, parse
from bough.model.checkpoint.checkpoint import Checkpoint
from target_worker.sweep import held_layers
from target_worker.sweep.held_layers import HeldLayers
from target_worker.sweep.streamed_model import StageLayers
from tests.fakes.models import CPU


def test_kernels_are_checked_on_all_devices_at_the_shapes_of_the_whole_model(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stages must compute by the same backend, which a stage's own layers could not decide."""
    checked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(held_layers, "checked_backend", lambda *given: checked.append(given))
    flags = ["--model", str(tiny), "--device", "cpu", "--resident-devices", "cuda:1=1GB,cuda:7=1GB"]
    config: Any = parse(TargetConfig, "t", flags, {})
    whole = HeldLayers(config, Checkpoint.open(tiny))
    HeldLayers(config, Checkpoint.open(tiny), StageLayers(0, 2, len(whole.layers)))
    assert checked == [("auto", [CPU, torch.device("cuda", 1)], whole.skeleton)]
