"""The target that a session runs at."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from orchestrator.cluster.worker_handle import TargetHandle


@dataclass(slots=True)
class TargetLease:
    """A running session's lease of a target, which counts it while the block runs."""

    target: TargetHandle
    has_slot: bool = False  # the target has answered a call, and keeps the session's KV
    has_moved: bool = False  # from a target that failed
    was_refused: bool = False  # a target has answered that it has no room
    _began: float = 0.0  # seconds on the monotonic clock

    def __enter__(self) -> TargetLease:
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def move(self, target: TargetHandle) -> None:
        self._leave()
        self.target, self.has_moved = target, True
        self._take()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Count the session nowhere while it waits in the block; afterwards at its target of then."""
        self._leave()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        self.target.num_running += 1
        self._began = time.monotonic()

    def _leave(self) -> None:
        self.target.num_running -= 1
        if self.has_slot:
            self.target.speed.stay_seconds.add(time.monotonic() - self._began)
        self.has_slot = False
