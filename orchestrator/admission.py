"""Who may run: so many requests at once, and so many more that wait for a place, first come first served.

What is beyond both is refused at once and told when to come back: a queue that grows without bound helps nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from bough.errors import Exhausted, Unavailable
from orchestrator.patience import Patience

NUM_RECENT = 32  # requests whose times are remembered
SHORTEST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0


class Admission:
    """Places of an orchestrator. All of it runs on one event loop."""

    def __init__(self, max_running: int, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_running = max_running
        self.max_waiting = max_waiting
        self._clock = clock
        self._num_free = max_running
        self._turns: deque[asyncio.Future[None]] = deque()  # of those that wait, in order of arrival
        self._refusal = ""
        self._began: dict[object, float] = {}  # when each place in use was taken
        self._held: deque[float] = deque(maxlen=NUM_RECENT)  # seconds that places were held lately
        self._promised = 0.0  # until then, places that come free are those of callers who were sent away

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return sum(not turn.done() for turn in list(self._turns))  # asked of by other threads too

    @property
    def is_closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._refusal != ""

    @property
    def wait_seconds(self) -> float:
        """How long one more request would wait for its place, by how long the others held theirs; 0 if one is free."""
        return 0.0 if self._num_free else (self.num_waiting + 1) * self._turnover_seconds

    @asynccontextmanager
    async def place(self, patience: Patience) -> AsyncIterator[None]:
        """A place for as long as the block runs; waits for its turn.

        Raises:
            Exhausted: the queue is full, or the turn did not come in time; with a delay.
            Unavailable: nobody is let in any more.
        """
        with patience.waiting():
            await self._turn(patience.queue_seconds)
        holder = object()
        self._began[holder] = self._clock()
        try:
            yield
        finally:
            self._held.append(self._clock() - self._began.pop(holder))
            self._pass_on()

    def close(self, refusal: str) -> None:
        """From now on everyone is refused as Unavailable with this text, those in the queue at once."""
        self._refusal = refusal
        for turn in self._turns:
            if not turn.done():
                turn.set_exception(Unavailable(refusal))

    def exhausted(self, problem: str) -> Exhausted:
        """The error for a caller who is sent away, with a delay that is later for each one than for the one before.

        If all were told the same moment, all would come back in it.
        """
        now = self._clock()
        self._promised = min(max(now, self._promised) + self._turnover_seconds, now + LONGEST_RETRY_SECONDS)
        retry_seconds = max(SHORTEST_RETRY_SECONDS, self._promised - now)
        return Exhausted(
            f"{problem}; another orchestrator would do, or this one in {retry_seconds:.1f} s", retry_seconds
        )

    @property
    def _turnover_seconds(self) -> float:
        """Seconds from one place that comes free to the next: the time that one is held, over their number.

        By the requests that ended lately; or by those that run, where these have had theirs for longer.
        """
        now = self._clock()
        ages = [now - began for began in self._began.values()]
        return max(_mean(self._held), _mean(ages)) / self.max_running

    async def _turn(self, queue_seconds: float) -> None:
        if self._refusal:
            raise Unavailable(self._refusal)
        if self._num_free:  # then nobody waits: a place that comes free goes to the first in the queue
            self._num_free -= 1
            return
        if self.num_waiting >= self.max_waiting:
            raise self.exhausted(f"{self.max_running} requests run and {self.num_waiting} wait, as many as may")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            async with asyncio.timeout(queue_seconds if queue_seconds < float("inf") else None):
                await turn
        except BaseException as exc:
            if turn in self._turns:
                self._turns.remove(turn)
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._pass_on()  # its turn came in the moment in which it left
            if isinstance(exc, TimeoutError):
                raise self.exhausted(f"no place came free in {queue_seconds:.3g} s (--queue-timeout)") from exc
            raise

    def _pass_on(self) -> None:
        """A place has come free: it is the first one's in the queue."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1


def _mean(values: deque[float] | list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
