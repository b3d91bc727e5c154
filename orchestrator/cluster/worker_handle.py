"""A known worker: what it serves, whether it is used, and the expected time of a request there."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Generic, TypeAlias, TypeVar

from bough.errors import BoughError, Unavailable
from bough.protocol.cost_curve import CostCurve
from bough.protocol.generation import WorkerInfo
from bough.protocol.ids import ScopedId
from bough.protocol.messages import VerifyResult
from bough.registry.records import WorkerLoad, WorkerRecord
from bough.tokenization.tokenizer import Tokenizer
from orchestrator.cluster.worker_clients import DraftClient, TargetClient
from orchestrator.sizing.round_times import RecentMedian, WorkerTimes

USUAL_OUTPUT = 128  # tokens that an answer is expected to have, unless limited to fewer
USUAL_ROWS = 8.0  # of a session in a sweep, before any were observed
USUAL_TOKENS = 2.0  # of a round, before any were observed
UNKNOWN = CostCurve((1, 512), (0.1, 1.0))  # assumed for a target that reports no cost curve
FIRST_PAUSE_SECONDS = 1.0  # pause of a worker after its first fault
LONGEST_PAUSE_SECONDS = 30.0  # limit of the pause, which doubles with each fault
ENOUGH_SESSIONS = 2  # consecutive failing sessions that count as the worker's fault
MAX_SESSIONS = 64  # limit of sessions whose failures are remembered


@dataclass(frozen=True, slots=True)
class Need:
    """What a request needs from a target."""

    num_tokens: int  # before the first generated one
    num_output: int  # limit of generated tokens
    held: Mapping[str, int]  # leading tokens whose KV a target is believed to hold, by worker id
    home_id: str = ""  # id of the target with the session's own slot, if any
    knows_held: bool = True  # False if the index could not be asked


@dataclass(slots=True)
class UsualRound:
    """Sizes of recent rounds at any target; shared by all, to leave the choice unaffected."""

    tree_rows: RecentMedian = field(default_factory=lambda: RecentMedian(USUAL_ROWS))  # of a session in a sweep
    num_tokens: RecentMedian = field(default_factory=lambda: RecentMedian(USUAL_TOKENS))

    def observe(self, result: VerifyResult) -> None:
        self.num_tokens.add(len(result.verdict.accepted_nodes) + 1)
        if result.num_trees:
            self.tree_rows.add(result.num_rows / result.num_trees)


def expected_seconds(
    times: WorkerTimes, usual: UsualRound, info: WorkerInfo, load: WorkerLoad, num_running: int, need: Need
) -> float:
    """Expected seconds of a request at a target, where this orchestrator runs `num_running` others.

    Missing tokens of the prompt are read in sweeps with other sessions' trees. The request waits for half a running
    sweep on average; then each round takes one shared sweep. Without room, another session must end first.
    """
    num_others = max(num_running, _num_held(info, load) - (need.home_id == info.worker_id))
    other_rows = round(num_others * usual.tree_rows.median)
    curve = times.curve or UNKNOWN
    reading = curve(max(1, need.num_tokens - need.held.get(info.worker_id, 0)) + other_rows)
    waiting = curve(other_rows) / 2 if num_others else 0.0
    num_rounds = max(1.0, min(need.num_output, USUAL_OUTPUT) / usual.num_tokens.median)
    working = num_rounds * curve(other_rows + round(usual.tree_rows.median))
    if need.home_id != info.worker_id and _lacks_room(info, load, need):
        waiting += expected_wait(times, num_others, reading + working)
    return reading + waiting + working


def expected_wait(times: WorkerTimes, num_there: int, usual_seconds: float) -> float:
    """Seconds until a session with a slot ends; before any was observed, it is assumed to take `usual_seconds`."""
    return (times.stay_seconds.median or usual_seconds) / max(1, num_there)


def _num_held(info: WorkerInfo, load: WorkerLoad) -> int:
    """Estimate of sessions in use there by all orchestrators; a lower bound, as short ones take less room."""
    return int(info.max_sessions * load.kv_used_bytes / load.kv_bytes) if load.kv_bytes else 0


def _lacks_room(info: WorkerInfo, load: WorkerLoad, need: Need) -> bool:
    """Whether there is certainly no room; in doubt the target decides."""
    length = min(need.num_tokens + 1, info.max_context)  # slots grow with their texts
    # One more session of the longest context would not have fit.
    token_bytes = load.kv_bytes / ((info.max_sessions + 1) * (info.max_context + info.max_nodes))
    return load.kv_bytes > 0 and length * token_bytes > load.kv_bytes - load.kv_used_bytes


def is_fault(exc: BoughError) -> bool:
    """Whether a call may succeed elsewhere or later: it got no answer, or an unspecified error."""
    return isinstance(exc, Unavailable) or type(exc) is BoughError


@dataclass(slots=True)
class Pause:
    """A pause that doubles from one fault to the next."""

    until: float = 0.0  # seconds on the monotonic clock
    num_faults: int = 0  # consecutive

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until

    def extend(self) -> None:
        """Count a fault and start a pause. A fault during a pause does not count: all calls that a worker's end
        interrupts are one fault.
        """
        if not self.is_over:
            return
        self.num_faults += 1
        seconds = FIRST_PAUSE_SECONDS * 2.0 ** min(self.num_faults - 1, 10)
        self.until = time.monotonic() + min(seconds, LONGEST_PAUSE_SECONDS)


@dataclass(slots=True)
class Health:
    """Health of one worker, as seen by this orchestrator.

    A worker that does not answer is paused for all sessions. One that answers a session's calls with errors is paused
    for that session, and for all once a second session fails with no success between: a single request that always
    fails is not its workers' fault.
    """

    _pause: Pause = field(default_factory=Pause)
    _pauses: OrderedDict[ScopedId, Pause] = field(default_factory=OrderedDict)  # by session whose calls failed
    _suspects: set[ScopedId] = field(default_factory=set)  # sessions whose calls failed since the last success

    @property
    def is_good(self) -> bool:
        return self._pause.is_over

    def is_good_for(self, session_id: ScopedId) -> bool:
        """Whether it is used for a session."""
        return self.is_good and (session_id not in self._pauses or self._pauses[session_id].is_over)

    def blame(self, session_id: ScopedId, exc: BoughError) -> None:
        """Record a session's failed call."""
        if isinstance(exc, Unavailable):
            self.lost()
        else:
            self.failed(session_id)

    def lost(self) -> None:
        """Record that it does not answer or has gone."""
        self._pause.extend()

    def failed(self, session_id: ScopedId) -> None:
        """Record that it answered this session's call with an internal error, or with an invalid answer."""
        self._pauses.setdefault(session_id, Pause()).extend()
        if len(self._pauses) > MAX_SESSIONS:
            self._pauses.popitem(last=False)
        self._suspects.add(session_id)
        if len(self._suspects) >= ENOUGH_SESSIONS:
            self._suspects.clear()
            self._pause.extend()

    def succeeded(self, session_id: ScopedId) -> None:
        """Record success: all suspicions end."""
        self._pause = Pause()
        self._suspects.clear()
        self._pauses.pop(session_id, None)


# The parts of a worker's report that change while it runs.
CHANGING = (
    *("weights_hash", "num_sessions", "kv_used_bytes", "num_waiting", "num_running", "num_passes"),
    *("notes", "stages", "stage_network_ns"),
)

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
        """Update the load, and facts that the worker did not know at its introduction."""
        if info.worker_id == self.record.worker_id:
            self.info = replace(self.info, **{name: getattr(info, name) for name in CHANGING})

    async def look(self, timeout_seconds: float) -> None:
        """Ask the worker for its load; without an answer, the last reported load stays."""
        with suppress(BoughError, TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                self.learn(await self.client.info())

    def is_usable_by(self, session_id: ScopedId) -> bool:
        """Whether it is usable for a session, for which it may have failed before."""
        return not self.problem and self.health.is_good_for(session_id)

    def expected_seconds(self, need: Need) -> float:
        """Expected time of a request at this target with its current load."""
        return expected_seconds(self.speed, self.usual, self.info, self.record.load, self.num_running, need)


TargetHandle: TypeAlias = WorkerHandle[TargetClient]
DraftHandle: TypeAlias = WorkerHandle[DraftClient]
AnyHandle: TypeAlias = TargetHandle | DraftHandle
Targets: TypeAlias = Sequence[TargetHandle]
