"""New requests that wait while no target can be used but one is expected back, as while it restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from bough.errors import Unavailable
from orchestrator.admission.admission import Admission
from orchestrator.cluster.directory import Directory
from orchestrator.cluster.served_models import TargetAway
from orchestrator.sessions.session import Deadline

POLL_SECONDS = 0.2

Result = TypeVar("Result")


@dataclass(slots=True)
class TargetWaiting:
    """Holds requests. Those that have places are limited by admission, here and behind them; others by `most_held`."""

    directory: Directory
    admission: Admission
    most_seconds: float  # since a target for the request could be used, and since the request began to wait
    most_held: float = inf  # beyond it a request is refused as if no target were expected back
    num_held: int = 0

    async def once_there(self, look: Callable[[], Awaitable[Result]], deadline: Deadline) -> Result:
        """The result of `look` as soon as it does not raise TargetAway; the wait is deducted from the request's budget.

        Raises Unavailable if no target came back in time, or this orchestrator drains and the call has no place.
        """
        try:
            return await look()
        except TargetAway as exc:
            if self.num_held >= self.most_held:
                raise
            away = exc
        self.num_held += 1
        try:
            with deadline.waiting():
                return await self._held(look, away, min(self.most_seconds, deadline.queue_seconds))
        finally:
            self.num_held -= 1

    async def _held(self, look: Callable[[], Awaitable[Result]], away: TargetAway, most_seconds: float) -> Result:
        began = time.monotonic()
        while True:
            last_usable = self.directory.last_usable(away.would_do)
            if time.monotonic() > min(began + most_seconds, last_usable + self.most_seconds):
                raise Unavailable(f"{away}; none came back in time (--failover-timeout, --queue-timeout)") from away
            await asyncio.sleep(POLL_SECONDS)
            if self.most_held < inf:  # no drain waits for those without a place
                self.admission.require_open()
            try:
                return await look()
            except TargetAway as exc:
                away = exc
