"""What files of secrets say, now: they are read again when they change, and a mistake in them locks nobody out."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from bough.concurrency.tasks import end
from bough.errors import ConfigError
from bough.security.private_files import Stamp, read_private, stamp_of

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0

Value = TypeVar("Value")


class WatchedFiles(Generic[Value]):
    """The value of some files together: the last one that could be used."""

    def __init__(self, name: str, paths: Sequence[str], load: Callable[[], Value]) -> None:
        """`load` reads all of the files; `name` is what they are called where they are logged.

        Raises:
            ConfigError: they cannot be used.
        """
        self._name, self._paths, self._load = name, tuple(paths), load
        self._stamps = self._stamps_now()  # before they are read: what is changed meanwhile is read once more
        self.value = load()

    def refresh(self, *, is_forced: bool = False) -> None:
        """Reads the files again where they have changed; where they cannot be used, the value before stays in force."""
        stamps = self._stamps_now()
        if stamps == self._stamps and not is_forced:
            return
        self._stamps = stamps
        try:
            self.value = self._load()
        except ConfigError as exc:
            logger.error("%s; what was read before stays in force", exc)
            return
        except Exception:  # the next change is looked at all the same
            logger.exception("%s cannot be read; what was read before stays in force", self._name)
            return
        logger.info("%s has been read again", self._name)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Looks after the files for as long as the block runs."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            await end(task)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await asyncio.to_thread(self.refresh)

    def _stamps_now(self) -> list[Stamp | None]:
        return [_stamp(path) for path in self._paths]


class WatchedFile(WatchedFiles[Value]):
    """The value of one file that others cannot read."""

    def __init__(self, setting: str, path: str, read: Callable[[str, str], Value]) -> None:
        """`read` makes a value of the file's name and its text.

        Raises:
            ConfigError: the file cannot be used.
        """
        name = f"{setting}: {path}"
        super().__init__(name, [path], lambda: read(name, read_private(setting, path)))


def _stamp(path: str) -> Stamp | None:
    try:
        return stamp_of(os.stat(path))
    except OSError:
        return None
