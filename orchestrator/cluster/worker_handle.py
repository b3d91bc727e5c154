"""A known worker: what it serves, how it behaves, and whether it is used."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Generic, TypeAlias, TypeVar

from bough.errors import BoughError
from bough.protocol.generation import WorkerInfo
from bough.protocol.messages import VerifyResult
from bough.registry.records import WorkerRecord
from bough.tokenization.tokenizer import Tokenizer
from orchestrator.cluster.expected_wait import Need, UsualRound, expected_seconds
from orchestrator.cluster.worker_clients import DraftClient, TargetClient
from orchestrator.cluster.worker_health import Health
from orchestrator.sizing.round_times import WorkerTimes

# Of what a worker tells of itself, as it changes while it runs.
CHANGING = ("weights_hash", "num_sessions", "kv_used_bytes", "num_waiting", "num_running", "num_passes")

AnyClient = TypeVar("AnyClient", DraftClient, TargetClient)


@dataclass(slots=True)
class WorkerHandle(Generic[AnyClient]):
    """A known worker."""

    record: WorkerRecord
    client: AnyClient
    info: WorkerInfo
    tokenizer: Tokenizer  # shared by workers with equal tokenizers
    problem: str = ""  # why it is not used, for good
    num_running: int = 0
    num_missing: int = 0  # consecutive polls of the index without it
    health: Health = field(default_factory=Health)
    speed: WorkerTimes = field(default_factory=WorkerTimes)  # for targets
    usual: UsualRound = field(default_factory=UsualRound)  # shared by all workers

    def __post_init__(self) -> None:
        self.speed.update(self.info.worker_id, self.info.cost)

    @property
    def is_usable(self) -> bool:
        return not self.problem and self.health.is_good

    @property
    def is_leaving(self) -> bool:
        """Whether the index no longer lists it: it drains, or will be forgotten."""
        return self.num_missing > 1

    @property
    def busyness(self) -> tuple[int, float]:
        """Sort key: sessions that this orchestrator runs there, then the KV use that the worker reported."""
        load = self.record.load
        return self.num_running, load.kv_used_bytes / max(1, load.kv_bytes)

    def observe(self, result: VerifyResult) -> None:
        self.speed.update(self.info.worker_id, result.cost)
        self.usual.observe(result)

    def learn(self, info: WorkerInfo) -> None:
        """Take over what the worker did not know at its introduction, and its load."""
        if info.worker_id == self.record.worker_id:
            self.info = replace(self.info, **{name: getattr(info, name) for name in CHANGING})

    async def look(self, timeout_seconds: float) -> None:
        """Ask the worker for its load; where it does not answer, the one that was told last stays."""
        with suppress(BoughError, TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                self.learn(await self.client.info())

    def is_usable_by(self, session_id: str) -> bool:
        """Whether it is usable for a session, for which it may have failed before."""
        return not self.problem and self.health.is_good_for(session_id)

    def expected_seconds(self, need: Need) -> float:
        """Expected time of a request at this target with its current load."""
        return expected_seconds(self.speed, self.usual, self.info, self.record.load, self.num_running, need)


TargetHandle: TypeAlias = WorkerHandle[TargetClient]
DraftHandle: TypeAlias = WorkerHandle[DraftClient]
AnyHandle: TypeAlias = TargetHandle | DraftHandle
Targets: TypeAlias = Sequence[TargetHandle]
