"""Contents of secret files, reloaded when they change; invalid changes are ignored."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

from bough.concurrency.tasks import background
from bough.errors import ConfigError
from bough.security.private_files import read_file

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0

Value = TypeVar("Value")
Stamp = tuple[int, int, int, int]  # changes whenever a file's contents or mode change, or another file replaces it


class WatchedFiles(Generic[Value]):
    """Value of several files together; the last usable one."""

    def __init__(self, name: str, paths: Sequence[str], load: Callable[[], Value]) -> None:
        """`load` reads all files; `name` is used in logs.

        Raises:
            ConfigError: the files are not usable.
        """
        self._name, self._paths, self._load = name, tuple(paths), load
        self._lock = threading.Lock()  # or the last to end, not the last to begin, would tell what is in the files
        self._stamps = self._stamps_now()  # taken before reading, so that changes during reading are noticed
        self.value = load()

    def refresh(self, *, is_forced: bool = False) -> None:
        """Reload changed files; if they are not usable, the previous value stays in force. Any thread."""
        with self._lock:
            stamps = self._stamps_now()
            if stamps == self._stamps and not is_forced:
                return
            self._stamps = stamps
            try:
                self.value = self._load()
            except ConfigError as exc:
                logger.error("%s; what was read before stays in force", exc)
                return
            except Exception:  # later changes must still be noticed
                logger.exception("%s cannot be read; what was read before stays in force", self._name)
                return
            logger.info("%s has been read again", self._name)

    def watched(self) -> AbstractAsyncContextManager[None]:
        """Watch the files during the block."""
        return background(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await asyncio.to_thread(self.refresh)

    def _stamps_now(self) -> list[Stamp | None]:
        return [_stamp(path) for path in self._paths]


class WatchedFile(WatchedFiles[Value]):
    """Value of one file that is closed to others."""

    def __init__(self, setting: str, path: str, read: Callable[[str, str], Value]) -> None:
        """`read` makes the value from the file's name and text.

        Raises:
            ConfigError: the file is not usable.
        """
        name = f"{setting}: {path}"
        super().__init__(name, [path], lambda: read(name, read_file(setting, path)))


def _stamp(path: str) -> Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns
