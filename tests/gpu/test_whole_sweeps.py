"""Whole sweeps over the path for GPUs, on a device that is pretended: right, in every order of work that marks allow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import TINY, save_model
from device_sweeps import Where, on_cpu, on_device
from pretend_lanes import ALWAYS, NEVER
from test_reproducible import FAMILIES

CLOSE = 1e-4  # torch's products and ours, in float32, over four layers

@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_what_the_cpu_gives(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", FAMILIES[family])
    mine, theirs = on_device(folder, Where(), torch.float32), on_cpu(folder, torch.float32)
    torch.testing.assert_close(mine, theirs, atol=CLOSE * float(theirs.abs().max()), rtol=0)
