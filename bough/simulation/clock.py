"""The clock of a simulated worker, real or scaled, and the network to it: latency, and injected failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from bough.errors import Unavailable
from bough.simulation.hashing import key_of, mixed, uniforms
from bough.simulation.profile import Profile

NANO = 1e-9


class SimulatedClock:
    """Simulated seconds since its creation, `scale` of them in a real second."""

    def __init__(
        self,
        scale: float = 1.0,
        real: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._scale, self._real, self._sleep = scale, real, sleep
        self._began = real()

    def now(self) -> float:
        """Simulated seconds since the creation of the clock."""
        return (self._real() - self._began) * self._scale

    def real_seconds(self, seconds: float) -> float:
        """The real duration of simulated seconds."""
        return seconds / self._scale

    def real_ns(self, seconds: float) -> int:
        """The real duration in nanoseconds, as in timings."""
        return round(self.real_seconds(seconds) / NANO)

    def sleep_until(self, moment: float) -> None:
        """Sleep until the simulated `moment`; not at all if it has passed."""
        if (remaining := self.real_seconds(moment - self.now())) > 0.0:
            self._sleep(remaining)


class Line:
    """The connection to one worker. Failures are a function of the call's number, so runs are repeatable."""

    def __init__(self, worker: str, profile: Profile, clock: SimulatedClock) -> None:
        """`worker` is "target" or "draft"."""
        self._worker, self._profile, self._clock = worker, profile, clock
        self._num_calls = 0

    @asynccontextmanager
    async def crossed(self) -> AsyncIterator[None]:
        """Delay a call in both directions and inject failures.

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
