"""The clock of a simulated worker: real time, or so many times as fast."""

from __future__ import annotations

import time
from collections.abc import Callable

NANO = 1e-9


class SimulatedClock:
    """Seconds since it was made, `scale` of them in a real one."""

    def __init__(
        self,
        scale: float = 1.0,
        real: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._scale, self._real, self._sleep = scale, real, sleep
        self._began = real()

    def now(self) -> float:
        """Simulated seconds since the beginning."""
        return (self._real() - self._began) * self._scale

    def real_seconds(self, seconds: float) -> float:
        """How long so many simulated seconds are."""
        return seconds / self._scale

    def real_ns(self, seconds: float) -> int:
        """The same in nanoseconds, as timings are told to others."""
        return round(self.real_seconds(seconds) / NANO)

    def sleep_until(self, moment: float) -> None:
        """Until it is so late; not at all where it is later."""
        if (left := self.real_seconds(moment - self.now())) > 0.0:
            self._sleep(left)
