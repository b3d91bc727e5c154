"""Who is there: the workers that the index names, what they say of themselves, and which of them to use.

The index is asked every now and then and believed only as far as the workers bear it out. While it does not answer, the
workers last known stay in use.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import grpc

from bough.errors import BoughError, Unavailable
from bough.generation import WorkerStatus
from bough.messages import PROTOCOL_VERSION, WorkerInfo
from bough.pairing import fetch_tokenizer
from bough.registry import LEASE_SECONDS, Registry, WorkerRecord
from bough.rpc import open_channel
from bough.tokenizer import Tokenizer, TokenizerFiles, first_difference
from orchestrator.workers import DraftClient, TargetClient

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
FIRST_PAUSE_SECONDS = 1.0  # after a fault a worker is left alone for so long,
LONGEST_PAUSE_SECONDS = 30.0  # then twice as long each time

AnyClient = TypeVar("AnyClient", DraftClient, TargetClient)


@dataclass(slots=True)
class Known(Generic[AnyClient]):
    """A worker that the index named."""

    record: WorkerRecord
    client: AnyClient
    info: WorkerInfo
    tokenizer: TokenizerFiles
    problem: str = ""  # why it is not used, as long as it is there
    num_running: int = 0
    last_listed: float = 0.0  # seconds on the monotonic clock
    num_faults: int = 0  # in a row
    paused_until: float = 0.0
    tokens: Tokenizer = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = Tokenizer(self.tokenizer)

    @property
    def is_usable(self) -> bool:
        return not self.problem and time.monotonic() >= self.paused_until

    def report(self, is_fault: bool) -> None:
        """A call went wrong, or went well."""
        self.num_faults = self.num_faults + 1 if is_fault else 0
        if is_fault:
            pause = min(FIRST_PAUSE_SECONDS * 2 ** (self.num_faults - 1), LONGEST_PAUSE_SECONDS)
            self.paused_until = time.monotonic() + pause


class Directory:
    """Keeps the list of workers fresh while it runs."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.index_problem = ""
        self._targets: dict[str, Known[TargetClient]] = {}
        self._drafts: dict[str, Known[DraftClient]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Polls the index for as long as the block runs."""
        await self._refresh()
        task = asyncio.create_task(self._poll())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            for known in self._everyone():
                await known.client.close()

    def target(self, preferred_id: str = "") -> Known[TargetClient]:
        """The target for a new request: the preferred one if it is there, otherwise the least busy.

        Raises:
            Unavailable: there is none.
        """
        usable = [known for known in self._targets.values() if known.is_usable]
        if not usable:
            raise Unavailable(self._why_no_target())
        return min(usable, key=lambda known: (known.record.worker_id != preferred_id, known.num_running))

    def draft(self) -> Known[DraftClient] | None:
        """The least busy draft worker, or None: then there are no trees."""
        usable = [known for known in self._drafts.values() if known.is_usable]
        return min(usable, key=lambda known: known.num_running, default=None)

    @property
    def has_target(self) -> bool:
        """Whether a request could be served now."""
        return any(known.is_usable for known in self._targets.values())

    def statuses(self) -> tuple[WorkerStatus, ...]:
        """All workers known."""
        return tuple(
            WorkerStatus(k.record.address, k.info, k.problem or ("" if k.is_usable else "did not answer; left alone"))
            for k in self._everyone()
        )

    def _everyone(self) -> list[Known[TargetClient] | Known[DraftClient]]:
        return [*self._targets.values(), *self._drafts.values()]

    def _why_no_target(self) -> str:
        if self.index_problem:
            return f"no target worker is known, and {self.index_problem}"
        problems = [f"{k.record.worker_id}: {k.problem or 'does not answer'}" for k in self._targets.values()]
        return "no target worker can be used: " + ("; ".join(problems) or "none is registered in the index")

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self._refresh()

    async def _refresh(self) -> None:
        try:
            records = await self.registry.workers()
        except Unavailable as exc:
            if not self.index_problem:
                logger.warning("%s; going on with the workers last known", exc)
            self.index_problem = str(exc)
            return
        self.index_problem = ""
        for record in records:
            await self._meet(record)
        await self._forget_unlisted()

    async def _meet(self, record: WorkerRecord) -> None:
        """Takes note of a listed worker; a new one is asked what it is."""
        known = self._targets.get(record.worker_id) or self._drafts.get(record.worker_id)
        if known is not None:
            known.last_listed = time.monotonic()
            return
        try:
            if record.kind == "target":
                self._targets[record.worker_id] = await _introduce(record, TargetClient(record.address))
            elif record.kind == "draft":
                self._drafts[record.worker_id] = await _introduce(record, DraftClient(record.address))
            else:
                return
        except BoughError as exc:
            logger.warning("%s is registered at %s, but: %s", record.worker_id, record.address, exc)
            return
        logger.info("%s at %s", record.worker_id, record.address)
        self._check_pairs()

    async def _forget_unlisted(self) -> None:
        oldest = time.monotonic() - LEASE_SECONDS
        tables: tuple[dict[str, Known[TargetClient]] | dict[str, Known[DraftClient]], ...] = (
            self._targets,
            self._drafts,
        )
        for table in tables:
            # A channel with calls in flight stays open: a worker that only lost the index still answers them.
            gone = [name for name, known in table.items() if known.last_listed < oldest and known.num_running == 0]
            for worker_id in gone:
                logger.warning("%s is gone", worker_id)
                await table.pop(worker_id).client.close()

    def _check_pairs(self) -> None:
        """A draft that speaks of other tokens than the targets is not used (it should have refused to start)."""
        target = next(iter(self._targets.values()), None)
        for draft in self._drafts.values():
            if draft.problem or target is None:
                continue
            if draft.info.tokenizer_fingerprint == target.info.tokenizer_fingerprint:
                continue
            difference = first_difference(draft.tokenizer.vocabulary, target.tokenizer.vocabulary)
            draft.problem = f"its tokenizer differs from {target.record.worker_id}'s: {difference}"
            logger.error("%s is not used: %s", draft.record.worker_id, draft.problem)


async def _introduce(record: WorkerRecord, client: AnyClient) -> Known[AnyClient]:
    """Asks a worker what it is. Raises Unavailable where it does not answer."""
    try:
        info = await client.info()
        async with open_channel(record.address) as channel:
            tokenizer = await fetch_tokenizer(channel, record.kind)
    except (BoughError, grpc.aio.AioRpcError) as exc:
        await client.close()
        raise Unavailable(f"it does not tell what it serves: {exc}") from exc
    known = Known(record, client, info, tokenizer, last_listed=time.monotonic())
    if info.protocol_version != PROTOCOL_VERSION:
        known.problem = f"it speaks protocol version {info.protocol_version}; this is version {PROTOCOL_VERSION}"
    return known
