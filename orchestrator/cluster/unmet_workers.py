"""Listed workers that could not be met: when each is tried again, and which attempts are logged."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bough.errors import BoughError
from bough.registry.records import WorkerRecord

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5  # between the first two attempts; each further pause is twice as long
LONGEST_PAUSE_SECONDS = 10.0
SHORTEST_SHARE = 0.5  # of a pause, so that orchestrators which failed together do not try again together
REMIND_SECONDS = 300.0  # between two lines of the log about one worker


@dataclass(slots=True)
class UnmetWorker:
    """A listed worker that did not tell what it serves. Times are seconds on the clock."""

    record: WorkerRecord
    problem: str = ""  # of the last attempt
    num_attempts: int = 0
    next_attempt: float = 0.0
    next_line: float = 0.0  # of the log


class UnmetWorkers:
    """All of them; one that is met, unlisted, or listed at another address begins anew."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unmet: dict[str, UnmetWorker] = {}  # by worker id

    def may_try(self, record: WorkerRecord) -> bool:
        """Whether a worker may be tried now."""
        unmet = self._unmet.get(record.worker_id)
        return unmet is None or unmet.record.address != record.address or self._clock() >= unmet.next_attempt

    def failed(self, record: WorkerRecord, exc: Exception) -> None:
        """Record that a worker could not be met; the first attempt is logged, and later one in a while."""
        unmet, now = self._unmet.get(record.worker_id), self._clock()
        if unmet is None or unmet.record.address != record.address:
            unmet = self._unmet[record.worker_id] = UnmetWorker(record)
        pause = min(FIRST_PAUSE_SECONDS * 2.0 ** min(unmet.num_attempts, 10), LONGEST_PAUSE_SECONDS)
        unmet.problem, unmet.num_attempts = str(exc) or type(exc).__name__, unmet.num_attempts + 1
        unmet.next_attempt = now + pause * random.uniform(SHORTEST_SHARE, 1.0)
        if now < unmet.next_line:
            return
        unmet.next_line = now + REMIND_SECONDS
        text = "%s is registered at %s, but could not be met (attempt %d): %s"
        is_ours = not isinstance(exc, BoughError)  # a bug, or an invalid answer
        level = logging.ERROR if is_ours else logging.WARNING
        where = record.worker_id, record.address, unmet.num_attempts, unmet.problem
        logger.log(level, text, *where, exc_info=exc if is_ours else None)

    def met(self, record: WorkerRecord) -> None:
        """Record that a worker has been met."""
        self._unmet.pop(record.worker_id, None)

    def keep_listed(self, records: Iterable[WorkerRecord]) -> None:
        """Forget those that are not among `records`, which are all that are listed now."""
        listed = {record.worker_id for record in records}
        self._unmet = {name: unmet for name, unmet in self._unmet.items() if name in listed}

    def problems(self, kind: str) -> dict[str, str]:
        """Why workers of a kind could not be met, by worker id."""
        return {name: unmet.problem for name, unmet in self._unmet.items() if unmet.record.kind == kind}
