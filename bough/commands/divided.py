"""Divides this machine's memory among the processes that a command is about to start, and says how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bough.config import WorkerConfig
from bough.launch import Settings
from bough.model.draft_needs import draft_needs
from bough.runtime.division import divide
from bough.runtime.machine import free_memory

GPU_DEVICES = ("nvidia[0-9]*", "dxg", "kfd", "nvhost-gpu")  # CUDA's, WSL2's, ROCm's, Jetson's, as files in /dev


def divided(settings: Settings, report: Callable[[str], None]) -> Settings:
    """The same settings with what each worker may take; `report` hears the plan.

    Where a worker computes on a GPU, or has no weights, they stay as they are: it finds out itself what there is.

    Raises:
        ConfigError: memory does not suffice.
        CheckpointError: the draft's model is not there, or damaged.
    """
    target, draft = settings.target, settings.draft
    if target.simulate or _may_be_gpu(target) or (draft is not None and _may_be_gpu(draft)):
        return settings
    needs = draft_needs(draft) if draft is not None else None
    division = divide(free_memory(), target, draft, needs, has_index=not settings.index_url)
    report("\n".join(division.lines()))
    return replace(settings, target=division.target, draft=division.draft)


def _may_be_gpu(config: WorkerConfig) -> bool:
    is_here = any(path for name in GPU_DEVICES for path in Path("/dev").glob(name))
    return config.device.startswith("cuda") or (config.device == "auto" and is_here)
