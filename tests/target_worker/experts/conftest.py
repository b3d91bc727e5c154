"""The experts of a small mixture."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.common.tiny_model import save_model
from target_worker.link.layer_extents import LayerExperts
from tests.fakes.model.families import FAMILIES
from tests.fakes.models import plan_of


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("mixture") / "model", FAMILIES["qwen3 moe"])


@pytest.fixture(scope="session")
def layers(mixture: Path) -> dict[int, LayerExperts]:
    return plan_of(mixture)
