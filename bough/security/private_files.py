"""Files with secrets: read only if closed to other users, reloaded when they change, written for their owner only."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Generic, TypeVar

from bough.concurrency.tasks import background
from bough.errors import ConfigError

FORBIDDEN = stat.S_IWGRP | stat.S_IRWXO  # a group may read, as with Kubernetes secrets
POLL_SECONDS = 1.0

Value = TypeVar("Value")
Stamp = tuple[int, int, int, int]  # changes whenever a file's contents or mode change, or another file replaces it
logger = logging.getLogger(__name__)


def read_file(setting: str, path: str, *, is_public: bool = False) -> str:
    """Read a file that must be closed to other users, unless it `is_public`, such as a certificate.

    Raises:
        ConfigError: names the setting: the file is missing, not text, or open to others.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            if mode & FORBIDDEN and not is_public:
                raise ConfigError(f"{setting}: {path} must be closed to other users (chmod 600), got mode {mode:o}")
            return stream.read()
    except OSError as exc:
        raise ConfigError(f"{setting}: {path} must be a readable file, got: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{setting}: {path} must be text in UTF-8") from exc


def write_private(setting: str, path: str, text: str) -> None:
    """Replace a file atomically. An existing file's owner, group and mode stay; a new one is its owner's only.

    Raises:
        ConfigError: names the setting.
    """
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:
            _keep_owner(stream.fileno(), target)
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(draft, target)
    except OSError as exc:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"{setting}: {path} must be a writable file, got: {exc.strerror}") from exc


def _keep_owner(descriptor: int, before: Path) -> None:
    """Give a new file the old one's owner, group and mode, as another user's process often reads it."""
    with suppress(FileNotFoundError):
        status = before.stat()
        try:
            os.fchown(descriptor, status.st_uid, status.st_gid)
        except PermissionError as exc:
            owner = f"user {status.st_uid}, group {status.st_gid}"
            raise PermissionError(exc.errno, f"only root can keep its owner ({owner})") from exc
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~FORBIDDEN)


class WatchedFiles(Generic[Value]):
    """A value read from several files; the latest usable one."""

    def __init__(self, name: str, paths: Sequence[str], load: Callable[[], Value]) -> None:
        """`load` reads all files; `name` is used in logs.

        Raises:
            ConfigError: the files are not usable.
        """
        self._name, self._paths, self._load = name, tuple(paths), load
        self._lock = threading.Lock()  # otherwise an older reload that ends last would set the value
        self._stamps = self._stamps_now()  # taken before reading, so that changes during reading are noticed
        self.value = load()

    def refresh(self, *, is_forced: bool = False) -> None:
        """Reload changed files; if they are not usable, the previous value stays in force. Thread-safe."""
        with self._lock:
            stamps = self._stamps_now()
            if stamps == self._stamps and not is_forced:
                return
            self._stamps = stamps
            try:
                self.value = self._load()
            except ConfigError as exc:
                logger.error("%s; the previous contents remain in force", exc)
                return
            except Exception:  # later changes must be found too
                logger.exception("%s cannot be read; the previous contents remain in force", self._name)
                return
            logger.info("%s has been reloaded", self._name)

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
    """A value read from one file that is closed to other users."""

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
