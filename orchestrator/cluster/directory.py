"""The known workers: reads them from the index, asks what they serve, and chooses among them.

The index is polled, and its entries are verified with the workers. While it does not answer, the last known workers
stay in use.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import inf
from typing import Any

import grpc

from bough.concurrency.tasks import background, end
from bough.errors import BoughError, Unavailable
from bough.processes.compatibility import fetch_tokenizer
from bough.protocol.generation import PROTOCOL_VERSION, WorkerInfo, WorkerStatus
from bough.protocol.ids import ScopedId
from bough.registry.records import WorkerRecord
from bough.registry.registry import LEASE_SECONDS, Registry
from bough.security.access import OPEN, Access
from bough.tokenization.vocabulary import TokenizerFiles, first_difference
from orchestrator.cluster.tokenizer_threads import Tokenizing
from orchestrator.cluster.worker_clients import AT_ONCE, DraftClient, IterationLimiter, TargetClient
from orchestrator.cluster.worker_handle import (
    AnyClient,
    AnyHandle,
    DraftHandle,
    TargetHandle,
    Targets,
    UsualRound,
    WorkerHandle,
)

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
MOST_MISSING = round(LEASE_SECONDS / POLL_SECONDS)  # consecutive polls without a worker before it is forgotten
SWEEP_SECONDS = 5.0  # between two cleanups of the index
LOOK_SECONDS = 0.5  # between two queries of workers' load, and limit for their answers
FIRST_LOOK_SECONDS = 3.0  # limit for which a start waits for listed workers to answer
WEIGHTS_SECONDS = 5.0  # between two times at which targets without a hash of their weights are asked
FIRST_PAUSE_SECONDS = 0.5  # between the first two attempts to meet a worker; each further pause is twice as long
LONGEST_PAUSE_SECONDS = 10.0
SHORTEST_SHARE = 0.5  # of a pause: orchestrators that failed together must not try again together
REMIND_SECONDS = 300.0  # between two lines of the log about one worker


def with_weights(targets: Targets, weights_hash: str) -> Targets:
    """The targets where a session that began with weights of this hash may continue.

    All `targets` pass for one model. Equal samples suffice while no two known hashes differ; after that only an equal
    hash does.
    """
    known = {target.info.weights_hash for target in targets} | {weights_hash}
    if len(known - {""}) <= 1:
        return targets
    return [target for target in targets if weights_hash and target.info.weights_hash == weights_hash]


def other_weights(targets: Targets, weights_hash: str) -> str:
    """Describe the targets that `with_weights` left out and their hashes, for an error message."""
    theirs = ", ".join(f"{known.record.worker_id} has {known.info.weights_hash or 'unknown ones'}" for known in targets)
    return f"weights: it began with {weights_hash or 'unknown ones'}, and {theirs}"


async def watch_weights(targets: Callable[[], Targets], pause_seconds: float) -> None:
    """Ask targets without a hash again, and log targets of the same model that have different weights."""
    logged: set[str] = set()
    while True:
        for target in targets():
            if not target.info.weights_hash and target.is_usable:
                try:
                    target.learn(await target.client.info())
                except BoughError as exc:
                    logger.debug("%s did not report its weights: %s", target.record.worker_id, exc)
        found = {first.info.contradiction(second.info) for first, second in combinations(targets(), 2)} - {""}
        for contradiction in found - logged:
            logger.warning("%s; sessions do not move between them", contradiction)
        logged = found
        await asyncio.sleep(pause_seconds)


@dataclass(slots=True)
class UnreachedWorker:
    """A listed worker that could not be met. Times are seconds on the clock."""

    record: WorkerRecord
    problem: str = ""  # of the last attempt
    num_attempts: int = 0
    next_attempt: float = 0.0
    next_line: float = 0.0  # of the log


class UnreachedWorkers:
    """Listed workers that have not reported what they serve; they are tried again from time to time.

    The attempts start again for a worker that has been met, unlisted, or listed at another address.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unreached: dict[str, UnreachedWorker] = {}  # by worker id

    def may_try(self, record: WorkerRecord) -> bool:
        """Whether a worker may be tried now."""
        unreached = self._unreached.get(record.worker_id)
        return (
            unreached is None or unreached.record.address != record.address or self._clock() >= unreached.next_attempt
        )

    def failed(self, record: WorkerRecord, exc: Exception) -> None:
        """Record that a worker could not be met; the first attempt is logged, later ones now and then."""
        unreached, now = self._unreached.get(record.worker_id), self._clock()
        if unreached is None or unreached.record.address != record.address:
            unreached = self._unreached[record.worker_id] = UnreachedWorker(record)
        pause = min(FIRST_PAUSE_SECONDS * 2.0 ** min(unreached.num_attempts, 10), LONGEST_PAUSE_SECONDS)
        unreached.problem, unreached.num_attempts = str(exc) or type(exc).__name__, unreached.num_attempts + 1
        unreached.next_attempt = now + pause * random.uniform(SHORTEST_SHARE, 1.0)
        if now < unreached.next_line:
            return
        unreached.next_line = now + REMIND_SECONDS
        text = "%s is registered at %s, but cannot be used (attempt %d): %s"
        is_ours = not isinstance(exc, BoughError)  # a bug, or an invalid answer
        level = logging.ERROR if is_ours else logging.WARNING
        where = record.worker_id, record.address, unreached.num_attempts, unreached.problem
        logger.log(level, text, *where, exc_info=exc if is_ours else None)

    def met(self, record: WorkerRecord) -> None:
        """Record that a worker has been met."""
        self._unreached.pop(record.worker_id, None)

    def keep_listed(self, records: Iterable[WorkerRecord]) -> None:
        """Forget workers that are not in `records`, the list of all that are registered now."""
        listed = {record.worker_id for record in records}
        self._unreached = {name: unreached for name, unreached in self._unreached.items() if name in listed}

    def sentences(self) -> tuple[str, ...]:
        """Each worker with its address and problem."""
        return tuple(
            f"{name} is registered at {unreached.record.address}, but cannot be used: {unreached.problem}"
            for name, unreached in self._unreached.items()
        )

    def problems(self, kind: str) -> dict[str, str]:
        """Why workers of a kind could not be met, by worker id."""
        return {name: unreached.problem for name, unreached in self._unreached.items() if unreached.record.kind == kind}


class Directory:
    """Keeps the list of workers up to date while it runs."""

    def __init__(self, registry: Registry, access: Access = OPEN) -> None:
        """`access` has the credentials for workers."""
        self.registry, self._access = registry, access
        self.tokenizing = Tokenizing()
        self.limiter = IterationLimiter(AT_ONCE)  # for all clients: how many sessions continue at once
        self.index_problem = ""
        self._targets: dict[str, TargetHandle] = {}
        self._drafts: dict[str, DraftHandle] = {}
        self._seen: dict[str, tuple[WorkerInfo, float]] = {}  # by identity of targets: when one could be used last
        self._usual = UsualRound()
        self._next_sweep = self._next_look = 0.0  # seconds on the monotonic clock
        self._meetings: dict[tuple[str, str], asyncio.Task[None]] = {}  # introductions of new workers, by kind and id
        self._unreached = UnreachedWorkers()

    @asynccontextmanager
    async def running(
        self,
        poll_seconds: float = POLL_SECONDS,
        weights_seconds: float = WEIGHTS_SECONDS,
        first_look_seconds: float = FIRST_LOOK_SECONDS,
    ) -> AsyncIterator[None]:
        """Poll the index for the duration of the block.

        Listed workers have been introduced when the block begins: a new process must not refuse its first
        request. Workers that do not answer are introduced later, in the background.
        """
        looked = asyncio.Event()
        with closing(self.tokenizing):
            try:
                async with background(
                    self._poll(looked, poll_seconds), watch_weights(lambda: self.targets, weights_seconds)
                ):
                    await looked.wait()
                    if self._meetings:
                        await asyncio.wait(self._meetings.values(), timeout=first_look_seconds)
                    yield
            finally:
                await end(*self._meetings.values())
                await asyncio.gather(*(known.client.close() for known in self._everyone()))

    @property
    def targets(self) -> tuple[TargetHandle, ...]:
        """Targets without a problem, including those that are paused after a fault."""
        return tuple(known for known in self._targets.values() if not known.problem)

    def matching(self, identity: str, weights_hash: str, max_context: int, max_nodes: int) -> tuple[TargetHandle, ...]:
        """The targets that give the same tokens, and accept sessions and trees of these sizes."""
        same = with_weights([known for known in self.targets if known.info.identity == identity], weights_hash)
        return tuple(k for k in same if k.info.max_context >= max_context and k.info.max_nodes >= max_nodes)

    def draft(self, target: TargetHandle, session_id: ScopedId, preferred_id: str) -> DraftHandle | None:
        """A draft worker with the target's tokenizer; None if there is none; rounds then have no trees.

        The preferred one, which has the session's KV, is chosen if it is usable, otherwise the least busy; one that is
        about to end, and refuses new sessions, comes last.
        """
        usable = [known for known in self._drafts.values() if known.is_usable_by(session_id) and _fit(known, target)]
        return min(usable, key=lambda k: (k.record.worker_id != preferred_id, k.is_leaving, k.busyness), default=None)

    def find(self, worker_id: str) -> AnyHandle | None:
        """The worker of this id; None if it is unknown."""
        return self._targets.get(worker_id) or self._drafts.get(worker_id)

    @property
    def seen(self) -> list[WorkerInfo]:
        """What targets have served since the start, including targets that are gone; one for each identity."""
        return [info for info, _ in self._seen.values()]

    @property
    def model_names(self) -> set[str]:
        """The models that any target has served since the start."""
        return {info.model_name for info in self.seen}

    def last_usable(self, would_do: Callable[[WorkerInfo], bool]) -> float:
        """When a suitable target was last usable, in seconds on the monotonic clock; -inf if never."""
        return max((when for info, when in self._seen.values() if would_do(info)), default=-inf)

    @property
    def has_target(self) -> bool:
        """Whether a request could be served now."""
        return any(known.is_usable for known in self._targets.values())

    async def look(self) -> None:
        """Query the load of all used workers for `statuses`, at most once in `LOOK_SECONDS`."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            await asyncio.gather(*(known.look(LOOK_SECONDS) for known in self._everyone() if known.is_usable))

    def statuses(self) -> tuple[WorkerStatus, ...]:
        return tuple(WorkerStatus(k.record.address, k.info, self._problem(k)) for k in self._everyone())

    def unreached(self) -> tuple[str, ...]:
        """Registered workers that have not reported what they serve, and why."""
        return self._unreached.sentences()

    def _problem(self, known: AnyHandle) -> str:
        """Why a worker is not used; empty if it is."""
        if known.problem or not known.is_usable:
            return known.problem or "did not answer; paused"
        if known.info.kind == "draft" and self._targets and not any(_fit(known, t) for t in self._targets.values()):
            target = next(iter(self._targets.values()))
            difference = first_difference(known.tokenizer.files.vocabulary, target.tokenizer.files.vocabulary)
            return f"its tokenizer differs from {target.record.worker_id}'s: {difference}"
        return ""

    def _everyone(self) -> list[AnyHandle]:
        return [*self._targets.values(), *self._drafts.values()]

    def why_no_target(self) -> str:
        """Why no target can be used, for an error message."""
        if self.index_problem:
            return f"no target worker is known, and {self.index_problem}"
        problems = [f"{k.record.worker_id}: {k.problem or 'does not answer'}" for k in self._targets.values()]
        unreached = {name: "has not reported yet what it serves" for kind, name in self._meetings if kind == "target"}
        unreached |= self._unreached.problems("target")
        problems += [f"{name}: {problem}" for name, problem in unreached.items()]
        return "no target worker can be used: " + ("; ".join(problems) or "none is registered in the index")

    async def _poll(self, looked: asyncio.Event, pause_seconds: float) -> None:
        while True:
            try:
                await self.refresh()
            except Exception:  # polling must survive any error
                logger.exception("the list of workers could not be refreshed")
            looked.set()
            await asyncio.sleep(pause_seconds)

    async def refresh(self) -> None:
        """Poll the index once."""
        for target in self.targets:
            self._see(target)
        try:
            records = await self.registry.workers()
        except Unavailable as exc:
            if not self.index_problem:
                logger.warning("%s; continuing with the workers last known", exc)
            self.index_problem = str(exc)
            return
        self.index_problem = ""
        await self._sweep()
        for known in self._everyone():
            known.num_missing += 1
        self._unreached.keep_listed(records)
        for record in records:
            self._note(record)
        await self._forget_unlisted()

    async def _sweep(self) -> None:
        """Clean up the index every few seconds; any orchestrator may do so at any time."""
        if time.monotonic() < self._next_sweep:
            return
        self._next_sweep = time.monotonic() + SWEEP_SECONDS
        with suppress(Unavailable):  # the next poll reports it
            await self.registry.sweep_expired()

    def _note(self, record: WorkerRecord) -> None:
        """Record that a process is listed, and introduce a new worker in the background, without delaying polls."""
        known = self.find(record.worker_id)
        if known is not None:
            known.num_missing = 0
            if known.record.address == record.address:
                known.record = record
            return
        key = record.kind, record.worker_id
        if record.kind in ("target", "draft") and key not in self._meetings and self._unreached.may_try(record):
            self._meetings[key] = asyncio.create_task(self._meet(record))
            self._meetings[key].add_done_callback(lambda _: self._meetings.pop(key))

    def _see(self, target: TargetHandle) -> None:
        if target.is_usable:
            self._seen[target.info.identity] = target.info, time.monotonic()

    async def _meet(self, record: WorkerRecord) -> None:
        """Introduce a new worker; a known worker at the same address has left it."""
        try:
            if record.kind == "target":
                client = TargetClient(record.address, record.worker_id, self._access, self.limiter)
                known = await self._introduce(record, client, self._drafts)
                known.usual = self._usual
                self._targets[record.worker_id] = known
                self._see(known)
            else:
                drafter = DraftClient(record.address, self._access, self.limiter)
                self._drafts[record.worker_id] = await self._introduce(record, drafter, self._targets)
        except Exception as exc:  # an invalid answer of one worker must not affect others
            self._unreached.failed(record, exc)
            return
        self._unreached.met(record)
        for other in self._everyone():
            if other.record.address == record.address and other.record.worker_id != record.worker_id:
                other.problem = f"{record.worker_id} has its address now"
        logger.info("%s at %s", record.worker_id, record.address)

    async def _introduce(
        self, record: WorkerRecord, client: AnyClient, others: Mapping[str, WorkerHandle[Any]]
    ) -> WorkerHandle[AnyClient]:
        """Ask a worker, which will work with `others`, what it serves; its client is closed if that fails.

        Raises Unavailable if it does not answer, or its answer is invalid.
        """
        try:
            info = await client.info()
            if info.worker_id != record.worker_id:
                raise Unavailable(f"{info.worker_id} has its address")
            async with self._access.channel(record.address).opened() as channel:
                files = await fetch_tokenizer(channel, record.kind, self._access)
            known = WorkerHandle(record, client, info, await self.tokenizing.shared(files))
            await self._read_vocabularies(known, others.values())
        except BaseException as exc:
            await client.close()
            if isinstance(exc, BoughError | grpc.aio.AioRpcError):
                raise Unavailable(f"it did not report what it serves: {exc}") from exc
            raise
        if info.protocol_version != PROTOCOL_VERSION:
            known.problem = f"it speaks protocol version {info.protocol_version}; this is version {PROTOCOL_VERSION}"
        return known

    async def _read_vocabularies(self, known: WorkerHandle[AnyClient], others: Iterable[WorkerHandle[Any]]) -> None:
        """Read and cache vocabularies of workers whose tokenizers differ, to name the difference in the problem."""
        misfits: list[TokenizerFiles] = [other.tokenizer.files for other in others if not _fit(other, known)]
        for files in (known.tokenizer.files, *misfits) if misfits else ():
            await self.tokenizing.run(partial(getattr, files, "vocabulary"))

    async def _forget_unlisted(self) -> None:
        """Forget workers by number of polls, not by time: an empty index or a paused process must not lose them."""
        # Channels with running calls stay open: a worker that only lost the index still answers them.
        gone = [known for known in self._everyone() if known.num_missing > MOST_MISSING and not known.num_running]
        for known in gone:
            logger.warning("%s is gone", known.record.worker_id)
            self._targets.pop(known.record.worker_id, None)
            self._drafts.pop(known.record.worker_id, None)
        await asyncio.gather(*(known.client.close() for known in gone))  # once no request can begin at any of them


def _fit(draft: WorkerHandle[Any], target: WorkerHandle[Any]) -> bool:
    """Whether both have the same tokenizer; a draft worker with another one should have refused to start."""
    return draft.info.tokenizer_fingerprint == target.info.tokenizer_fingerprint
