"""Supervision of the processes of one machine: ended ones are restarted, and each event is reported."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bough.concurrency.tasks import end
from bough.errors import Unavailable
from bough.processes.child import Child
from bough.processes.compile_once import COMPILING
from bough.processes.launch import DRAFT, INDEX, Cluster
from bough.registry.registry import Registry

WATCH_SECONDS = 0.2
LINE_LENGTH = 200  # characters of a log's last line that a report quotes
DISPENSABLE = DRAFT  # without it, trees come from prompt lookup, or there are none

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When an ended process is restarted: exponential backoff and a limit of consecutive restarts."""

    first_pause_seconds: float = 0.5  # doubled for each consecutive restart
    longest_pause_seconds: float = 30.0
    max_in_a_row: int = 5  # consecutive restarts, after which it is given up
    steady_seconds: float = 60.0  # time of service after which the count starts again

    def pause_seconds(self, number: int) -> float | None:
        """Seconds before the consecutive restart `number`, from 1; None to give up."""
        if number > self.max_in_a_row:
            return None
        return min(self.first_pause_seconds * 2.0 ** (number - 1), self.longest_pause_seconds)


DEFAULT_POLICY = RestartPolicy()


@asynccontextmanager
async def supervised(cluster: Cluster, say: Say, policy: RestartPolicy = DEFAULT_POLICY) -> AsyncIterator[None]:
    """Supervise a ready cluster while the block runs; `say` is called with each event.

    A draft that keeps ending is given up. For any other process the block is cancelled.

    Raises:
        Unavailable: a required process was given up; quotes the last lines of its log.
    """
    block = asyncio.current_task()
    assert block is not None, "a coroutine runs in a task"
    watching = asyncio.create_task(ClusterSupervisor(cluster, say, policy).run())

    def cancel_block(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            block.cancel()

    watching.add_done_callback(cancel_block)
    try:
        yield
    except asyncio.CancelledError:
        if watching.done() and not watching.cancelled():
            block.uncancel()
            watching.result()
        raise
    finally:
        watching.remove_done_callback(cancel_block)  # an ended block must not be cancelled
        await end(watching)


class ClusterSupervisor:
    """Watches every process of a cluster."""

    def __init__(self, cluster: Cluster, say: Say, policy: RestartPolicy) -> None:
        self._cluster, self._say, self._policy = cluster, say, policy

    async def run(self) -> None:
        """Run until cancelled. Raises Unavailable if a required process is given up."""
        registry = self._cluster.registry()
        watches = [asyncio.create_task(self._keep(name, registry)) for name in self._cluster.children]
        watches.append(asyncio.create_task(self._follow(registry)))
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_EXCEPTION)
            for watch in done:
                watch.result()
        finally:
            await end(*watches)
            await registry.close()

    async def _keep(self, name: str, registry: Registry) -> None:
        """Restart a process whenever it ends; returns if it is given up and others go on."""
        num_ends, back_at = 0, time.monotonic()
        while True:
            child = self._cluster.children[name]
            while not child.has_ended():
                await asyncio.sleep(WATCH_SECONDS)
            has_been_steady = time.monotonic() - back_at >= self._policy.steady_seconds
            num_ends = 1 if has_been_steady else num_ends + 1
            pause_seconds = self._policy.pause_seconds(num_ends)
            if pause_seconds is None:
                return self._give_up(child, num_ends)
            again = f"starting it again in {pause_seconds:g} s ({num_ends} of {self._policy.max_in_a_row})"
            self._say(f"{_ending(child)}; {again}")
            await asyncio.sleep(pause_seconds)
            began = time.monotonic()
            child = self._cluster.restart(name)
            back_at = float("inf")
            if await self._is_back(child, registry):
                back_at = time.monotonic()
                self._say(f"{child.title} is back after {back_at - began:.1f} s")

    async def _follow(self, registry: Registry) -> None:
        """Say when a draft is ready that the start did not wait for."""
        draft, began = self._cluster.children.get(DISPENSABLE), time.monotonic()
        if draft is None or draft.last_line() != COMPILING:
            return
        self._say(f"{draft.title} is still {COMPILING}: until it is ready, answers come more slowly")
        if await self._is_back(draft, registry):
            self._say(f"{draft.title} is ready after {time.monotonic() - began:.1f} s more; running answers use it too")

    async def _is_back(self, child: Child, registry: Registry) -> bool:
        """Wait until it serves; False if it has ended before."""
        while not child.has_ended():
            missing = await self._cluster.missing(registry)
            if child.name not in missing and INDEX not in missing:
                return True
            await asyncio.sleep(WATCH_SECONDS)
        return False

    def _give_up(self, child: Child, num_ends: int) -> None:
        """Give up a draft. Raises Unavailable for any other process."""
        ending = f"{_ending(child)}; {num_ends} times in a row"
        if child.name != DISPENSABLE:
            raise Unavailable(f"{ending}: given up. End of its log:\n{child.tail()}")
        self._cluster.give_up(child.name)
        self._say(f"{ending}: going on without it, which is slower and changes no token")


def _ending(child: Child) -> str:
    """One line with the process, how it ended, and its last log line."""
    line = child.last_line()[:LINE_LENGTH]
    return f"{child.title} {child.how_it_ended()}" + (f"; its last line was: {line}" if line else "")
