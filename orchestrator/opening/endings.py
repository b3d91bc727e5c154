"""Releases a request's resources at workers and in the index after its stream has ended."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from bough.errors import BoughError
from orchestrator.cluster.directory import Directory
from orchestrator.cluster.worker_handle import AnyHandle, TargetHandle
from orchestrator.opening.recorder import Recorder
from orchestrator.sessions.session import Session


class Endings:
    """Sessions being released in the background; ending streams do not wait for it."""

    def __init__(self, directory: Directory, recorder: Recorder) -> None:
        self._directory = directory
        self._recorder = recorder
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by session id

    def begin(self, session: Session, target: TargetHandle) -> None:
        """Start releasing a session."""
        task = asyncio.create_task(self._forget(session, target))
        self._tasks[session.session_id] = task
        task.add_done_callback(lambda _: self._remove(session.session_id, task))

    async def done(self, session_id: str) -> None:
        """Wait until an earlier stream's resources in the session are released."""
        if session_id in self._tasks:
            await asyncio.wait({self._tasks[session_id]})

    async def all_done(self) -> None:
        """Wait until all are released."""
        while self._tasks:
            await asyncio.wait({*self._tasks.values()})

    async def release(self, session_id: str, epoch: int, worker: AnyHandle | None) -> None:
        """Release a session at a worker, if that is known and answers."""
        if worker is not None:
            with suppress(BoughError):  # gone, never had it, or another request's by now: nothing to free
                await worker.client.release(session_id, epoch)

    async def _forget(self, session: Session, target: TargetHandle) -> None:
        await self._recorder.settled(session.session_id)  # the request's record is kept
        self._recorder.drop(session.session_id, session.epoch)
        for worker in (target, self._directory.find(session.draft_id)):
            await self.release(session.session_id, session.epoch, worker)

    def _remove(self, session_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(session_id) is task:  # a later stream of the session may have ended meanwhile
            del self._tasks[session_id]
