"""What a file of secrets says, now: it is read again when it changes, and a mistake in it locks nobody out."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from bough.concurrency.tasks import end
from bough.errors import ConfigError
from bough.security.private_files import Stamp, read_private, stamp_of

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0

Value = TypeVar("Value")


class WatchedFile(Generic[Value]):
    """A file's value: the last one that could be used."""

    def __init__(self, setting: str, path: str, read: Callable[[str, str], Value]) -> None:
        """`read` makes a value of the file's name and its text.

        Raises:
            ConfigError: the file cannot be used.
        """
        self._setting, self._path, self._read = setting, path, read
        self._stamp: Stamp | None
        text, self._stamp = read_private(setting, path)
        self.value = read(f"{setting}: {path}", text)

    def refresh(self, *, is_forced: bool = False) -> None:
        """Reads the file again where it has changed; where it cannot be used, what it said before stays in force."""
        stamp = self._stamp_now()
        if stamp == self._stamp and not is_forced:
            return
        self._stamp = stamp
        try:
            text, self._stamp = read_private(self._setting, self._path)
            self.value = self._read(f"{self._setting}: {self._path}", text)
        except ConfigError as exc:
            logger.error("%s; what was read before stays in force", exc)
            return
        logger.info("%s: %s has been read again", self._setting, self._path)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Looks after the file for as long as the block runs."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            await end(task)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await asyncio.to_thread(self.refresh)

    def _stamp_now(self) -> Stamp | None:
        try:
            return stamp_of(os.stat(self._path))
        except OSError:
            return None
