"""The clock of a simulated worker: real time, or scaled."""

from __future__ import annotations

import time
from collections.abc import Callable

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
