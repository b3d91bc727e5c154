"""How a draft and a target share one GPU: the draft says what it needs, and the target leaves it that. No torch."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from bough.config.processes import DraftConfig, TargetConfig
from bough.processes.memory_division import DraftNeeds
from bough.runtime.kv_budget import MOST_BYTES
from bough.runtime.machine import may_be_gpu
from bough.sizing.placement import gigabytes

CONTEXT_BYTES = 1000**3  # of a process on a GPU: CUDA's context, libraries, graphs, and what a step computes
KV_SESSIONS = 8  # of the longest context, that a draft has memory for which is not told


class SharedGpu(NamedTuple):
    """Settings of both, which keep within one GPU's memory, and why, for people."""

    target: TargetConfig
    draft: DraftConfig
    words: str


def on_one_gpu(target: TargetConfig, draft: DraftConfig) -> bool:
    """Whether both may compute on the same one: on the first where nothing else is said."""
    devices = [config.device for config in (target, draft)]
    return all(map(may_be_gpu, devices)) and _number(devices[0]) == _number(devices[1])


def divide_gpu(target: TargetConfig, draft: DraftConfig, needs: DraftNeeds) -> SharedGpu:
    """The draft's KV is settled, and the target's memory is what the draft leaves; what a user has told stays."""
    kv = draft.kv_memory or max(needs.session, min(MOST_BYTES, KV_SESSIONS * needs.session))
    share = CONTEXT_BYTES + needs.weights + kv
    words = (
        f"GPU memory: at most {gigabytes(share)} for the draft worker, of which {gigabytes(kv)} for KV and "
        f"{gigabytes(needs.weights)} for weights; "
    )
    draft = replace(draft, kv_memory=kv)
    if target.device_memory:
        return SharedGpu(target, draft, f"{words}{gigabytes(target.device_memory)} for the target, as told")
    reserve = target.device_reserve or share
    return SharedGpu(replace(target, device_reserve=reserve), draft, f"{words}most of the rest for the target")


def _number(device: str) -> int:
    found = re.search(r"\d+$", device)
    return int(found[0]) if found else 0
