"""Two workers on one GPU have budgets that sum to what it has, whichever of them starts first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bough.cli.machine import memory_division
from bough.cli.machine.memory_division import CONTEXT_BYTES, DraftNeeds, divide_gpu, on_one_gpu
from bough.config.processes import DraftConfig, TargetConfig, parse
from bough.errors import ConfigError
from bough.model.sizes import memory_budget
from bough.model.sizes.memory_budget import device_budget

GB = 1000**3
CARD = 25_757_220_864
NEEDS = DraftNeeds(weights=5 * GB, session=300_000_000)
GPU = torch.device("cuda", 0)


def target(**flags: Any) -> TargetConfig:
    return parse(TargetConfig, "t", ["--model", "m", *_flags(flags)], {})


def draft(**flags: Any) -> DraftConfig:
    return parse(DraftConfig, "d", ["--model", "m", *_flags(flags)], {})


def _flags(flags: dict[str, Any]) -> list[str]:
    return [part for name, value in flags.items() for part in ("--" + name.replace("_", "-"), str(value))]


@pytest.mark.parametrize(
    ("first", "second", "is_one"),
    [
        ("auto", "auto", True),
        ("cuda", "cuda:0", True),
        ("auto", "cuda:1", False),
        ("cuda:1", "cuda:1", True),
        ("cpu", "auto", False),
        ("cuda:1", "cpu", False),
    ],
)
def test_workers_share_a_gpu_if_both_devices_are_the_same(
    first: str, second: str, is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_division, "may_be_gpu", lambda device: device != "cpu")
    assert on_one_gpu(target(device=first), draft(device=second)) is is_one


@pytest.mark.parametrize("has_draft_started", [False, True])
def test_the_target_uses_the_memory_that_the_draft_leaves(
    has_draft_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = divide_gpu(target(), draft(), NEEDS)
    share = CONTEXT_BYTES + 5 * GB + shared.draft.kv_memory
    assert shared.draft.kv_memory == 2 * GB
    free = CARD - share if has_draft_started else CARD
    monkeypatch.setattr(memory_budget, "free_device_bytes", lambda _: free)
    monkeypatch.setattr(memory_budget, "whole_device_bytes", lambda _: CARD)
    assert device_budget(shared.target, GPU) == int(0.95 * (CARD - share))
    assert shared.words == (
        "GPU memory: at most 8.00 GB for the draft worker, of which 2.00 GB for KV and 5.00 GB for weights; most of "
        "the rest for the target"
    )


def test_a_users_settings_are_kept() -> None:
    shared = divide_gpu(target(device_memory="10GB"), draft(kv_memory="1GB"), NEEDS)
    assert (shared.target.device_memory, shared.target.device_reserve) == (10 * GB, 0)
    assert shared.draft.kv_memory == GB
    assert divide_gpu(target(device_reserve="12GB"), draft(), NEEDS).target.device_reserve == 12 * GB


def test_a_card_that_is_full_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "free_device_bytes", lambda _: CARD)
    monkeypatch.setattr(memory_budget, "whole_device_bytes", lambda _: CARD)
    with pytest.raises(
        ConfigError, match=r"^--device-reserve: must be less than the memory of cuda:0, 25.76 GB, got 30.00 GB"
    ):
        device_budget(target(device_reserve="30GB"), GPU)
