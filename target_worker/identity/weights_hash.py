"""The hash of all served weights, which distinguishes checkpoints with equal samples; cached on disk.

It takes long for a checkpoint that is new to a machine, so startup does not wait: a low-priority thread computes it and
leaves the link to sweeps.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from bough.config.cache_paths import cache_folder
from bough.errors import CheckpointError, ConfigError
from bough.model.checkpoint.atomic_files import make_folder, replace
from target_worker.link.direct_io import FileState, open_file

logger = logging.getLogger(__name__)

QUIET_SECONDS = 2.0  # without a sweep, after which no answer is in progress
BUSY_SHARE = 0.02  # share of time spent reading while sweeps run
LOOK_SECONDS = 0.05  # between two checks whether sweeps run
LOWEST_PRIORITY = 19
PIECE_BYTES = 8 * 1024 * 1024  # of one read


def file_digest(file: Path, state: FileState, before_piece: Callable[[], None] = lambda: None) -> str:
    """SHA-256 of a file in this state, as `sha256sum` prints it; cached.

    `before_piece` is called before each read and may block. Reads bypass the page cache; without O_DIRECT the file's
    pages are dropped afterwards. Raises CheckpointError for a file that cannot be read, or has changed its state.
    """
    digest, opened = hashlib.sha256(), open_file(file)
    try:
        _require(file, opened.descriptor, state)
        with mmap.mmap(-1, PIECE_BYTES) as room:
            offset = 0
            while offset < state.size:
                before_piece()
                count = os.preadv(opened.descriptor, [room], offset)
                if count == 0:
                    break  # the check of the state below reports truncation
                digest.update(memoryview(room)[:count])
                if not opened.is_direct:
                    os.posix_fadvise(opened.descriptor, offset, count, os.POSIX_FADV_DONTNEED)
                offset += count
        _require(file, opened.descriptor, state)
    except OSError as exc:
        raise CheckpointError(f"{file}: cannot be read: {exc}") from exc
    finally:
        os.close(opened.descriptor)
    _remember(file, state, digest.hexdigest())
    return digest.hexdigest()


def known_digest(file: Path, state: FileState) -> str | None:
    """The cached digest of a file in this state; None if there is none."""
    try:
        found = _entry(file, state).read_text()
    except (OSError, ValueError):
        return None
    return found if re.fullmatch("[0-9a-f]{64}", found) else None


def whole_digest(digests: Mapping[Path, str]) -> str:
    """Hash of all files of a checkpoint by their names in its folder: the same on every machine."""
    lines = sorted(f"{digest} {file.name}\n" for file, digest in digests.items())
    return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()


def _require(file: Path, descriptor: int, state: FileState) -> None:
    if FileState.of(descriptor) != state:
        raise CheckpointError(f"{file}: has been written to, or replaced, since the model was opened")


def _remember(file: Path, state: FileState, digest: str) -> None:
    entry = _entry(file, state)
    try:
        make_folder("BOUGH_CACHE_DIR", entry.parent)
        replace(entry, lambda partial: partial.write_text(digest))
    except ConfigError as exc:
        logger.warning("%s; the weights are read again at the next start", exc)


def _entry(file: Path, state: FileState) -> Path:
    """Path of a cached digest, derived from the file's path and state."""
    name = hashlib.blake2b(f"{os.path.realpath(file)}\n{tuple(state)}".encode(), digest_size=16).hexdigest()
    return cache_folder() / "weights" / f"{name}.sha256"


class Closed(Exception):
    """The worker is being closed."""


class ReadPacing:
    """Paces reads: at full speed while no sweeps run, otherwise in a small share of the time."""

    def __init__(
        self,
        idle_seconds: Callable[[], float],
        wait: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`idle_seconds` is the time since the last sweep; `wait` waits for seconds and returns True when closing."""
        self._idle_seconds, self._wait, self._clock = idle_seconds, wait, clock
        self._began = clock()

    def give_way(self) -> None:
        """Return when the next part may be read. Raises Closed."""
        now = self._clock()
        until = now + (now - self._began) / BUSY_SHARE
        while self._idle_seconds() < QUIET_SECONDS and self._clock() < until:
            if self._wait(LOOK_SECONDS):
                raise Closed
        if self._wait(0.0):
            raise Closed
        self._began = self._clock()


class WeightsHash:
    """Hash of files as they are at construction. Close it before their readers."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Raises CheckpointError if a file cannot be read."""
        try:
            self._states = {file: FileState.of(file) for file in sorted(set(files))}
        except OSError as exc:
            raise CheckpointError(f"{exc.filename}: cannot be read: {exc}") from exc
        known = {file: known_digest(file, state) for file, state in self._states.items()}
        self._digests = {file: digest for file, digest in known.items() if digest is not None}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def value(self) -> str:
        """The hash; empty until it is known. Any thread."""
        digests = dict(self._digests)
        return whole_digest(digests) if len(digests) == len(self._states) else ""

    def require_unchanged(self) -> None:
        """Raise CheckpointError if a file has changed since construction: two versions may have been read."""
        for file, state in self._states.items():
            with suppress(OSError):  # removed: open descriptors still read the old contents
                if FileState.of(file) != state:
                    raise CheckpointError(f"{file}: was written to, or replaced, while the model was loaded")

    def start(self, idle_seconds: Callable[[], float]) -> None:
        """Start hashing files without a known digest; `idle_seconds` returns the time since the last sweep."""
        pace = ReadPacing(idle_seconds, self._closed.wait)
        self._thread = threading.Thread(target=self._run, args=(pace,), name="weights-hash", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, if it was started."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, pace: ReadPacing) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)  # on Linux: of the thread only
        with suppress(Closed):
            try:
                for file, state in self._states.items():
                    if file not in self._digests:
                        self._digests[file] = file_digest(file, state, pace.give_way)
            except CheckpointError as exc:
                logger.warning("%s; weights are compared by samples only", exc)
