"""Division of one machine's memory among the processes of `bough up`: of CPU workers, or of a GPU that both share.

Memory that processes take besides weights and KV is that of docs/decisions/040-processes-of-bough-up.md, plus a margin.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bough.config.processes import DraftConfig, TargetConfig
from bough.errors import ConfigError
from bough.runtime.kv_budget import MOST_BYTES, kv_budget
from bough.runtime.machine import may_be_gpu
from bough.sizing.placement import gigabytes

INDEX_BYTES = 50 * 1000**2
ORCHESTRATOR_BYTES = 150 * 1000**2
WORKER_BYTES = 320 * 1000**2  # Python, torch, kernels and buffers
SPARE_BYTES, SPARE_SHARE = 200 * 1000**2, 0.1  # left free, the larger of the two, for page cache and other programs
LEAST_TARGET_BYTES = 100 * 1000**2  # smallest budget accepted here, below that of any model
CONTEXT_BYTES = 1000**3  # of a process on a GPU: CUDA's context, libraries, graphs, and what a step computes
KV_SESSIONS = 8  # of the longest context, that a draft has memory for which is not told


class DraftNeeds(NamedTuple):
    """Bytes that a draft takes besides its process."""

    weights: int
    session: int  # KV of a session of the longest context
    step: int = 0  # what a step of recurrent layers computes
    least: int | None = None  # KV for which there must be room; None is that of a session of the longest context
    row: int = 0  # KV of a token


@dataclass(frozen=True, slots=True)
class Share:
    """The memory and threads of one process."""

    name: str
    num_bytes: int
    num_threads: int
    remark: str = ""

    def __str__(self) -> str:
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return f"{self.name:15}{gigabytes(self.num_bytes):>9}, {threads}{', ' if self.remark else ''}{self.remark}"


@dataclass(frozen=True, slots=True)
class Division:
    """A share for each process, and the workers' settings that respect it."""

    free: int
    shares: tuple[Share, ...]
    target: TargetConfig
    draft: DraftConfig | None

    def lines(self) -> Sequence[str]:
        """Lines for display, one for each process."""
        spare = self.free - sum(share.num_bytes for share in self.shares)
        last = f"  {'left free':15}{gigabytes(spare):>9}"
        if spare < 0:
            last = (
                f"  more than is free by {gigabytes(-spare)}: this machine may swap, or kill a process for its memory"
            )
        return [
            f"memory: {gigabytes(self.free)} are free for these processes; at most",
            *(f"  {share}" for share in self.shares),
            last,
        ]


def divide(
    free: int, target: TargetConfig, draft: DraftConfig | None, needs: DraftNeeds | None, has_index: bool
) -> Division:
    """Divide `free` bytes: the others get what they need, the target most of the rest; given settings are kept.

    `has_index` says whether an index runs here too. Workers compute in turns, so each gets all threads.

    Raises:
        ConfigError: too little is left for the target.
    """
    shares = [Share("index", INDEX_BYTES, 1)] if has_index else []
    shares.append(Share("orchestrator", ORCHESTRATOR_BYTES, 1))
    if draft is not None and needs is not None:
        kv = draft.kv_memory or kv_budget(needs.session, free // 2, needs.least)
        remark = f"of which {gigabytes(kv)} for KV and {gigabytes(needs.weights)} for weights"
        shares.append(Share("draft worker", WORKER_BYTES + needs.weights + needs.step + kv, draft.threads, remark))
        draft = replace(draft, kv_memory=kv)
    others = sum(share.num_bytes for share in shares) + WORKER_BYTES
    spare = max(SPARE_BYTES, int(free * SPARE_SHARE))
    budget = target.device_memory or free - spare - others
    if budget < LEAST_TARGET_BYTES:
        raise ConfigError(
            f"--device-memory: must be at least {gigabytes(LEAST_TARGET_BYTES)}, got {gigabytes(max(0, budget))}: of "
            f"{gigabytes(free)} free, other processes take {gigabytes(others)} and {gigabytes(spare)} stay free; use a "
            "smaller --kv-memory, or --draft none"
        )
    require_kv(target, budget)
    remark = f"of which {gigabytes(budget)} for weights, KV and activations"
    shares.append(Share("target worker", WORKER_BYTES + budget, target.threads, remark))
    return Division(free, tuple(shares), replace(target, device_memory=budget), draft)


def require_kv(target: TargetConfig, memory: int) -> None:
    """Raise ConfigError for a --kv-memory of the target that `memory` bytes for all of it cannot hold."""
    if target.kv_memory >= memory:
        raise ConfigError(
            f"--kv-memory: must be less than {gigabytes(memory)}, which are for weights, KV and activations, got "
            f"{gigabytes(target.kv_memory)}"
        )


def require_session(target: TargetConfig, needs: DraftNeeds) -> None:
    """Raise ConfigError for a --kv-memory that holds no session at all; `needs` are those of the target's model.

    The worker refuses also what holds none of --max-context, once it knows the model's own limit.
    """
    least = (1 + target.max_nodes) * needs.row
    if 0 < target.kv_memory < least:
        raise ConfigError(
            f"--kv-memory: must be at least {least} bytes, for one token and a tree of {target.max_nodes} nodes, got "
            f"{target.kv_memory}"
        )


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
    least = needs.session if needs.least is None else needs.least
    kv = draft.kv_memory or max(least, min(MOST_BYTES, KV_SESSIONS * needs.session))
    share = CONTEXT_BYTES + needs.weights + needs.step + kv
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
