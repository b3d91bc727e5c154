"""The simulated network of calls to a worker: latency, and injected failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bough.errors import Unavailable
from bough.simulation.clock import SimulatedClock
from bough.simulation.hashing import key_of, mixed, uniforms
from bough.simulation.profile import Profile


class Line:
    """The connection to one worker. Failures are a function of the call's number, so that runs are repeatable."""

    def __init__(self, worker: str, profile: Profile, clock: SimulatedClock) -> None:
        """`worker` is "target" or "draft"."""
        self._worker, self._profile, self._clock = worker, profile, clock
        self._num_calls = 0

    @asynccontextmanager
    async def crossed(self) -> AsyncIterator[None]:
        """Delay a call on both ways and inject failures.

        Raises:
            Unavailable: a failure of the profile is active.
        """
        await self._pass()
        await self._fail()
        yield
        await self._pass()

    async def _pass(self) -> None:
        seconds = self._profile.network.call_seconds(self._profile.factors_at(self._clock.now())) / 2
        if seconds:
            await asyncio.sleep(self._clock.real_seconds(seconds))

    async def _fail(self) -> None:
        self._num_calls += 1
        uniform = float(uniforms(mixed(key_of(self._worker), self._num_calls)))
        now = self._clock.now()
        failure = self._profile.failure_at(self._worker, now, uniform)
        if failure is None:
            return
        if failure.kind == "unavailable":
            raise Unavailable(f"simulated failure of the {self._worker} worker at second {now:.1f} of its profile")
        if failure.for_seconds is None:
            await asyncio.Event().wait()  # until the caller gives up
        else:
            end = failure.at_second + failure.for_seconds
            await asyncio.sleep(self._clock.real_seconds(max(0.0, end - now)))
