"""Division of this machine's memory among the processes that a command starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bough.model.sizes.draft_needs import draft_needs
from bough.processes.gpu_division import divide_gpu, on_one_gpu
from bough.processes.launch import Settings
from bough.processes.memory_division import divide
from bough.runtime.machine import free_memory, may_be_gpu


def divided(settings: Settings, report: Callable[[str], None]) -> Settings:
    """Settings with a memory budget for each worker; `report` is called with the division.

    Settings with a GPU or a simulated worker are returned unchanged: such workers find their budgets themselves. But of
    two workers on one GPU the target leaves the draft its share, whichever starts first.

    Raises:
        ConfigError: there is too little memory.
        CheckpointError: the draft's model is missing or damaged.
    """
    target, draft = settings.target, settings.draft
    if not target.simulate and draft is not None and on_one_gpu(target, draft):
        shared = divide_gpu(target, draft, draft_needs(draft))
        report(shared.words)
        return replace(settings, target=shared.target, draft=shared.draft)
    if target.simulate or may_be_gpu(target.device) or (draft is not None and may_be_gpu(draft.device)):
        return settings
    needs = draft_needs(draft) if draft is not None else None
    division = divide(free_memory(), target, draft, needs, has_index=not settings.index_url)
    report("\n".join(division.lines()))
    return replace(settings, target=division.target, draft=division.draft)
