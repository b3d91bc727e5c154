"""How the memory of one machine is divided among the processes of `bough up`: sizes in, settings of each out.

Only where the CPU computes: an accelerator's memory is measured by whoever computes on it. Figures of what processes
take beside weights and KV are those of `python -m loadtest.pipeline.memory`, and some more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bough.config.processes import DraftConfig, TargetConfig
from bough.errors import ConfigError
from bough.runtime.kv_budget import kv_budget
from bough.sizing.placement import gigabytes

INDEX_BYTES = 50 * 1000**2
ORCHESTRATOR_BYTES = 150 * 1000**2
WORKER_BYTES = (
    320 * 1000**2
)  # Python, torch, kernels, buffers of calls; 100 MB of them are shared with the other worker
LEFT_BYTES, LEFT_SHARE = 200 * 1000**2, 0.1  # that stay free, the larger of the two: files' pages, and other programs
LEAST_TARGET_BYTES = 100 * 1000**2  # a smaller budget than any model's is refused here, where it says why


class DraftNeeds(NamedTuple):
    """What a draft takes beside its process, in bytes."""

    weights: int
    session: int  # KV of the longest


@dataclass(frozen=True, slots=True)
class Share:
    """What one process may take."""

    name: str
    num_bytes: int
    num_threads: int
    remark: str = ""

    def __str__(self) -> str:
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return f"{self.name:15}{gigabytes(self.num_bytes):>9}, {threads}{', ' if self.remark else ''}{self.remark}"


@dataclass(frozen=True, slots=True)
class Division:
    """A share for each process, and the workers' settings that keep to it."""

    free: int
    shares: tuple[Share, ...]
    target: TargetConfig
    draft: DraftConfig | None

    def lines(self) -> Sequence[str]:
        """For people, one a process."""
        left = self.free - sum(share.num_bytes for share in self.shares)
        last = f"  {'left free':15}{gigabytes(left):>9}"
        if left < 0:
            last = f"  more than is free by {gigabytes(-left)}: this machine may swap, or end a process for its memory"
        return [
            f"memory: {gigabytes(self.free)} are free for these processes; at most",
            *(f"  {share}" for share in self.shares),
            last,
        ]


def divide(
    free: int, target: TargetConfig, draft: DraftConfig | None, needs: DraftNeeds | None, has_index: bool
) -> Division:
    """Divides `free` bytes: what the others need, and most of the rest to the target; what a user has told stays.

    `needs` are the draft's; `has_index` is whether an index is started here too. Workers compute in turns, each while
    the other waits for it, so each has all threads.

    Raises:
        ConfigError: nothing would be left for a target.
    """
    shares = [Share("index", INDEX_BYTES, 1)] if has_index else []
    shares.append(Share("orchestrator", ORCHESTRATOR_BYTES, 1))
    if draft is not None and needs is not None:
        kv = draft.kv_memory or kv_budget(needs.session, free // 2)
        remark = f"of which {gigabytes(kv)} for KV and {gigabytes(needs.weights)} for weights"
        shares.append(Share("draft worker", WORKER_BYTES + needs.weights + kv, draft.threads, remark))
        draft = replace(draft, kv_memory=kv)
    others = sum(share.num_bytes for share in shares) + WORKER_BYTES
    left = max(LEFT_BYTES, int(free * LEFT_SHARE))
    budget = target.device_memory or free - left - others
    if budget < LEAST_TARGET_BYTES:
        raise ConfigError(
            f"--device-memory: of {gigabytes(free)} that are free the other processes take {gigabytes(others)}, and "
            f"{gigabytes(left)} stay free; {gigabytes(max(0, budget))} are left for the target, which must have "
            f"{gigabytes(LEAST_TARGET_BYTES)} or more; a smaller --kv-memory, or --draft none, leaves it more"
        )
    remark = f"of which {gigabytes(budget)} for weights, KV and activations"
    shares.append(Share("target worker", WORKER_BYTES + budget, target.threads, remark))
    return Division(free, tuple(shares), replace(target, device_memory=budget), draft)
