"""Admission: a limited number of requests runs at once, a limited number waits in a FIFO queue.

Further requests are refused at once with a retry delay, since an unbounded queue helps nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bough.errors import Exhausted, Unavailable
from orchestrator.sessions.session import Deadline

NUM_RECENT = 32  # requests whose durations are averaged
SHORTEST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0


@dataclass(slots=True, eq=False)
class Hold:
    """A request's place, or its turn in the queue. A call that resumes the request takes it over."""

    turn: asyncio.Future[None] | None = None  # that the request waits for, or has waited for
    is_further: bool = False  # a further request of a call: the first has begun, or waits before this one

    @property
    def is_waiting(self) -> bool:
        return self.turn is not None and not self.turn.done()


class Admission:
    """The places of an orchestrator. Used on one event loop."""

    def __init__(self, max_running: int, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_running = max_running
        self.max_waiting = max_waiting
        self._clock = clock
        self._num_free = max_running
        self._queue: deque[Hold] = deque()  # in order of arrival
        self._refusal = ""
        self._began: dict[Hold, float] = {}  # by request: when it got its place
        self._held: deque[float] = deque(maxlen=NUM_RECENT)  # durations for which the latest requests had their places
        self._promised = 0.0  # until then, places that become free are expected to go to refused callers

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return sum(hold.is_waiting for hold in list(self._queue))  # a copy, as other threads call this

    @property
    def num_running(self) -> int:
        """Requests that have places, including those of a call that have not begun yet."""
        return len(self._began)

    @property
    def is_closed(self) -> bool:
        """Whether further requests are refused."""
        return self._refusal != ""

    @property
    def wait_seconds(self) -> float:
        """Expected wait of one more request for a place, from others' durations; 0 if a place is free."""
        return 0.0 if self._num_free else (self.num_waiting + 1) * self._turnover_seconds

    @contextmanager
    def holding(self, hold: Hold, earlier: Hold | None = None) -> Iterator[None]:
        """Free the request's place or turn when the block ends.

        It takes over the place or turn of an `earlier` call of the same request at once, before that call has ended.
        """
        if earlier is not None:
            self._take_over(earlier, hold)
        try:
            yield
        finally:
            self._leave(hold)

    @contextmanager
    def together(self, num: int) -> Iterator[list[Hold]]:
        """Take places, or turns in the queue, for all requests of one call, until each has ended or the block has.

        Raises:
            Exhausted: there is no room for all, so none got a place; has a retry delay.
            Unavailable: further requests are refused.
        """
        self._require_room(num)
        holds = [Hold(is_further=index > 0) for index in range(num)]
        for hold in holds:
            self._enter(hold)
        try:
            yield holds
        finally:
            for hold in holds:
                self._leave(hold)

    async def place(self, hold: Hold, deadline: Deadline) -> None:
        """Wait for the request's turn; then it has a place.

        Raises:
            Exhausted: the queue is full, or the turn did not come in time; has a retry delay.
            Unavailable: further requests are refused.
        """
        with deadline.waiting():
            await self._turn(hold, deadline.queue_seconds)

    def require_open(self) -> None:
        """Raise Unavailable if further requests are refused."""
        if self._refusal:
            raise Unavailable(self._refusal)

    def close(self, refusal: str) -> None:
        """Refuse further requests as Unavailable with this text; requests with a place or a turn keep it."""
        self._refusal = refusal

    def exhausted(self, problem: str, num: int = 1) -> Exhausted:
        """The error for a refused caller of `num` requests, with a retry delay that increases from caller to caller.

        With equal delays, all would return at the same moment.
        """
        now = self._clock()
        self._promised = min(max(now, self._promised) + num * self._turnover_seconds, now + LONGEST_RETRY_SECONDS)
        retry_seconds = max(SHORTEST_RETRY_SECONDS, self._promised - now)
        return Exhausted(f"{problem}; try another orchestrator, or this one in {retry_seconds:.1f} s", retry_seconds)

    @property
    def _turnover_seconds(self) -> float:
        """Seconds between two places becoming free: the duration of a request divided by the number of places.

        The duration is that of recently ended requests, or the age of running ones if that is longer.
        """
        now = self._clock()
        ages = [now - began for began in self._began.values()]
        return max(_mean(self._held), _mean(ages)) / self.max_running

    def _take_over(self, earlier: Hold, hold: Hold) -> None:
        if earlier in self._began:
            self._began[hold] = self._began.pop(earlier)
        elif earlier in self._queue:
            hold.turn = asyncio.get_running_loop().create_future()
            self._queue[self._queue.index(earlier)] = hold

    async def _turn(self, hold: Hold, queue_seconds: float) -> None:
        if hold not in self._began and hold not in self._queue:
            self._require_room(1)
            self._enter(hold)
        if hold in self._began:
            return
        assert hold.turn is not None, "it waits for one"
        try:
            async with asyncio.timeout(queue_seconds if queue_seconds < float("inf") else None):
                await hold.turn
        except TimeoutError as exc:
            raise self.exhausted(f"no place came free in {queue_seconds:.3g} s (--queue-timeout)") from exc

    def _require_room(self, num: int) -> None:
        self.require_open()
        if num > self._num_free + self.max_waiting - self.num_waiting:
            problem = f"{self.num_running} requests run and {self.num_waiting} wait"
            beyond = f"and {num} more are above the limits, {self.max_running} and {self.max_waiting}"
            raise self.exhausted(f"{problem}, {'the limits' if num == 1 else beyond}", num)

    def _enter(self, hold: Hold) -> None:
        if self._num_free:  # then the queue is empty: a free place goes to the first in the queue
            self._num_free -= 1
            self._began[hold] = self._clock()
        else:
            hold.turn = asyncio.get_running_loop().create_future()
            self._queue.append(hold)

    def _leave(self, hold: Hold) -> None:
        if hold in self._queue:
            self._queue.remove(hold)
        if hold in self._began:
            self._held.append(self._clock() - self._began.pop(hold))
            self._pass_on()

    def _pass_on(self) -> None:
        """Give a free place to the first in the queue."""
        while self._queue:
            hold = self._queue.popleft()
            if hold.turn is not None and not hold.turn.done():
                self._began[hold] = self._clock()
                hold.turn.set_result(None)
                return
        self._num_free += 1


def _mean(values: deque[float] | list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
