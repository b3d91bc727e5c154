"""Releases a request's resources at workers and in the index after its stream has ended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial

from bough.concurrency.tasks import end
from bough.errors import BoughError, Unavailable
from bough.protocol.ids import ScopedId
from orchestrator.admission.active_streams import Stream
from orchestrator.cluster.directory import Directory
from orchestrator.cluster.target_place import TargetPlace
from orchestrator.cluster.worker_handle import AnyHandle, TargetHandle
from orchestrator.opening.recorder import Recorder, session_record
from orchestrator.sessions.session import Session

# Seconds before further attempts to release; a target keeps the slot for a minute in any case (--lease-seconds).
RETRY_PAUSES = (1.0, 2.0, 4.0, 8.0)


class Endings:
    """Sessions being released in the background; ending streams do not wait for it."""

    def __init__(self, directory: Directory, recorder: Recorder) -> None:
        self._directory = directory
        self._recorder = recorder
        self.retry_pauses: Sequence[float] = RETRY_PAUSES
        self._tasks: dict[ScopedId, set[asyncio.Task[None]]] = {}  # by session id
        self._retries: set[asyncio.Task[None]] = set()  # releases that got no answer; nobody waits for them

    @property
    def is_idle(self) -> bool:
        """Whether everything has been released or given up."""
        return not self._tasks and not self._retries

    def end(self, stream: Stream, session: Session, place: TargetPlace) -> None:
        """Start releasing a stream's session, unless it is kept or goes on in another stream."""
        target, is_refused = place.target, self._recorder.is_refused(session.session_id)
        if session.keep or stream.is_superseded or stream.is_closed:
            is_over = stream.is_superseded or stream.is_closed
            before = session_record(session, place) if session.round else session.before
            self._recorder.end(session.session_id, session.epoch, None if is_over else before)
        if session.keep and is_refused and not stream.is_closed:
            self._begin(session, self._release_if_closed(session, target))
        if not session.epoch or (session.keep and not stream.is_closed):
            return
        if stream.is_closed:  # in the index, too
            self._begin(session, self._release_everywhere(session, target))
        elif stream.is_superseded:
            stream.leave(partial(self._forget_unless_taken, session, target))
        else:
            self._begin(session, self._forget(session, target))

    def let_go(self, session: Session, target: TargetHandle, place: TargetPlace) -> None:
        """Start releasing a session at a target where it may have a slot; the session runs at its place's target."""
        self._begin(session, self._release(session.session_id, session.epoch, target, place))

    async def close(self, session_id: ScopedId) -> bool:
        """Close a session in the index and at its workers; returns whether the index knew it. Raises Unavailable."""
        await self._recorder.until_written(session_id)
        closed = await self._directory.registry.close_session(session_id)
        if closed is not None and closed.record is not None:
            for worker_id in (closed.record.target_id, closed.record.draft_id):
                await self._release(session_id, closed.epoch, self._directory.find(worker_id))
        return closed is not None

    async def done(self, session_id: ScopedId) -> None:
        """Wait until earlier streams' resources in the session are released."""
        if session_id in self._tasks:
            await asyncio.wait({*self._tasks[session_id]})

    async def all_done(self) -> None:
        """Wait until workers have been asked for all releases, and give up further attempts."""
        while self._tasks:
            await asyncio.wait({task for tasks in self._tasks.values() for task in tasks})
        await end(*self._retries)

    def _forget_unless_taken(self, session: Session, target: TargetHandle, taken: ScopedId) -> None:
        """Start releasing a session unless it is the one that was taken over."""
        if taken != session.session_id:
            self._begin(session, self._forget(session, target))

    def _begin(self, session: Session, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.setdefault(session.session_id, set()).add(task)
        task.add_done_callback(partial(self._ended, session.session_id))

    def _ended(self, session_id: ScopedId, task: asyncio.Task[None]) -> None:
        self._tasks[session_id].remove(task)
        if not self._tasks[session_id]:
            del self._tasks[session_id]

    async def _forget(self, session: Session, target: TargetHandle) -> None:
        await self._recorder.until_written(session.session_id)  # the request's record is kept
        self._recorder.drop(session.session_id, session.epoch)
        await self._release_everywhere(session, target)

    async def _release_if_closed(self, session: Session, target: TargetHandle) -> None:
        """Release a session that was closed at another orchestrator, which may not know where it ran."""
        with suppress(Unavailable):
            if await self._directory.registry.load_session(session.session_id) is None:
                await self._release_everywhere(session, target)

    async def _release_everywhere(self, session: Session, target: TargetHandle) -> None:
        for worker in (target, self._directory.find(session.draft_id)):
            await self._release(session.session_id, session.epoch, worker)

    async def _release(
        self, session_id: ScopedId, epoch: int, worker: AnyHandle | None, place: TargetPlace | None = None
    ) -> None:
        """Release a session at a worker, if the worker is known; without an answer, retry in the background.

        With a place, stop retrying once the session runs there again.
        """
        if worker is not None and not await _has_released(worker, session_id, epoch):
            retrying = asyncio.create_task(self._release_later(session_id, epoch, worker, place))
            self._retries.add(retrying)
            retrying.add_done_callback(self._retries.discard)

    async def _release_later(self, name: ScopedId, epoch: int, worker: AnyHandle, place: TargetPlace | None) -> None:
        for seconds in self.retry_pauses:
            await asyncio.sleep(seconds * random.uniform(0.5, 1.0))
            is_known = self._directory.find(worker.record.worker_id) is worker
            if not is_known or (place is not None and place.target is worker):
                return
            if await _has_released(worker, name, epoch):
                return


async def _has_released(worker: AnyHandle, session_id: ScopedId, epoch: int) -> bool:
    """Release a session at a worker; False if the worker does not answer."""
    try:
        await worker.client.release(session_id, epoch)
    except Unavailable:
        return False
    except BoughError:  # the worker never had the session, or another request has it now: nothing to free
        pass
    return True
