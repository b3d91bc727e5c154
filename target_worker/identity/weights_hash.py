"""The whole hash of the weights that are served: what samples cannot tell apart, it can.

It is known late where a checkpoint is new to a machine, so a start does not wait for it. It is computed on a thread of
low priority, which leaves the link to sweeps.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from bough.errors import CheckpointError
from target_worker.link.file_digests import file_digest, known_digest, whole_digest
from target_worker.link.open_files import FileState

logger = logging.getLogger(__name__)

QUIET_SECONDS = 2.0  # without a sweep, after which nobody is in the middle of an answer
BUSY_SHARE = 0.02  # of the time for reading, while somebody is
LOOK_SECONDS = 0.05  # between two looks at that
LOWEST_PRIORITY = 19


class Closed(Exception):
    """The worker is being closed."""


class ReadPacing:
    """When the next piece may be read: at once while no sweeps run, and otherwise in a small share of the time."""

    def __init__(
        self,
        idle_seconds: Callable[[], float],
        wait: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`idle_seconds` have passed since the last sweep; `wait` takes seconds, and is True when all is over."""
        self._idle_seconds, self._wait, self._clock = idle_seconds, wait, clock
        self._began = clock()

    def give_way(self) -> None:
        """Returns when the next piece may be read. Raises Closed."""
        now = self._clock()
        until = now + (now - self._began) / BUSY_SHARE
        while self._idle_seconds() < QUIET_SECONDS and self._clock() < until:
            if self._wait(LOOK_SECONDS):
                raise Closed
        if self._wait(0.0):
            raise Closed
        self._began = self._clock()


class WeightsHash:
    """Of files as they are when this is made. Close it before what they are read with."""

    def __init__(self, files: Iterable[Path], is_same: Callable[[], bool] = lambda: False) -> None:
        """`is_same` tells whether the files hold, as far as samples show, what they held when this was made.

        Raises CheckpointError where one of them is not there.
        """
        try:
            self._states = {file: FileState.of(file) for file in sorted(set(files))}
        except OSError as exc:
            raise CheckpointError(f"{exc.filename}: cannot be read: {exc}") from exc
        known = {file: known_digest(file, state) for file, state in self._states.items()}
        self._digests = {file: digest for file, digest in known.items() if digest is not None}
        self._is_same = is_same
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def value(self) -> str:
        """Empty as long as it is not known; any thread."""
        digests = dict(self._digests)
        return whole_digest(digests) if len(digests) == len(self._states) else ""

    def require_unchanged(self) -> None:
        """Raises CheckpointError where what was read in the meantime may be of two files."""
        for file, state in self._states.items():
            with suppress(OSError):  # removed: what is open of it stays as it was
                if FileState.of(file) != state:
                    raise CheckpointError(f"{file}: was written to, or replaced, while the model was loaded")

    def start(self, idle_seconds: Callable[[], float]) -> None:
        """Begins to read what is not known; `idle_seconds` have passed since the last sweep."""
        pace = ReadPacing(idle_seconds, self._closed.wait)
        self._thread = threading.Thread(target=self._run, args=(pace,), name="weights-hash", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, if it was started."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, pace: ReadPacing) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)  # on Linux of the thread alone
        with suppress(Closed):
            try:
                for file in self._states:
                    while file not in self._digests:
                        self._read(file, pace)
            except CheckpointError as exc:
                logger.warning("%s; the weights are told from others' by samples only", exc)

    def _read(self, file: Path, pace: ReadPacing) -> None:
        """Its digest, or its state as it is now, where it was touched: the times are others, and the bytes the same.

        Raises:
            Closed: by `close`.
            CheckpointError: the file cannot be read, or is another, or may be.
        """
        state = self._states[file]
        try:
            self._digests[file] = file_digest(file, state, pace.give_way)
        except CheckpointError:
            with suppress(OSError):
                while not (found := FileState.of(file)).is_settled():
                    if self._closed.wait(LOOK_SECONDS):
                        raise Closed from None
                if found[:2] == state[:2] and found != state and self._is_same():
                    self._states[file] = found
                    return
            raise
