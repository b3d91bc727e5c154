"""A worker that the index named: what it says of itself, how it has behaved, and whether it is to be used."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from bough.protocol.messages import VerifyResult, WorkerInfo
from bough.registry.records import WorkerRecord
from bough.tokenization.tokenizer import Tokenizer
from bough.tokenization.vocabulary import TokenizerFiles
from orchestrator.cluster.expected_wait import ExpectedWait, Need, UsualRound, expected_seconds
from orchestrator.cluster.worker_clients import DraftClient, TargetClient
from orchestrator.cluster.worker_health import Health

AnyClient = TypeVar("AnyClient", DraftClient, TargetClient)


@dataclass(slots=True)
class WorkerHandle(Generic[AnyClient]):
    """A worker that the index named."""

    record: WorkerRecord
    client: AnyClient
    info: WorkerInfo
    tokens: Tokenizer  # the same object for all workers that have the same
    problem: str = ""  # why it is not used, as long as it is there
    num_running: int = 0
    num_missing: int = 0  # looks in a row at which the index did not name it
    health: Health = field(default_factory=Health)
    pace: ExpectedWait = field(default_factory=ExpectedWait)  # of a target
    usual: UsualRound = field(default_factory=UsualRound)  # the same object for all workers

    def __post_init__(self) -> None:
        self.pace.times.told(self.info.worker_id, self.info.cost)

    @property
    def tokenizer(self) -> TokenizerFiles:
        return self.tokens.files

    @property
    def is_usable(self) -> bool:
        return not self.problem and self.health.is_good

    @property
    def is_leaving(self) -> bool:
        """Whether the index lists it no more: it drains, or is about to be forgotten."""
        return self.num_missing > 1

    @property
    def busyness(self) -> tuple[int, float]:
        """To choose the least of: what this orchestrator runs there, then what all do, as the worker last said."""
        load = self.record.load
        return self.num_running, load.kv_used_bytes / max(1, load.kv_bytes)

    def observe(self, result: VerifyResult) -> None:
        """A round at this target is over."""
        self.pace.times.told(self.info.worker_id, result.cost)
        self.usual.observe(result)

    def learn(self, info: WorkerInfo) -> None:
        """What it says of itself later: of what it serves, that is what it did not know before."""
        if info.worker_id == self.record.worker_id:
            self.info = replace(self.info, weights_hash=info.weights_hash)

    def is_usable_by(self, session_id: str) -> bool:
        """Whether a session, which may have seen it fail, is to use it."""
        return not self.problem and self.health.is_good_for(session_id)

    def expected_seconds(self, need: Need) -> float:
        """How long a request would take at this target, which runs others by now."""
        return expected_seconds(self.pace, self.usual, self.info, self.record.load, self.num_running, need)
