"""Files that are whole or not there, and the folders that they stand in."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bough.errors import ConfigError


def make_folder(flag: str, folder: Path) -> None:
    """A folder to write to, and those around it.

    Raises:
        ConfigError: naming the flag: a file is in the way, or it may not be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"{flag}: {folder} cannot be made: {exc.strerror}; another folder would do") from exc


def replace(file: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file at once or not at all.

    Raises:
        ConfigError: the disk is full, or will not be written to.
    """
    partial = file.with_name(file.name + ".partial")
    try:
        write(partial)
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        partial.replace(file)
    except Exception as exc:
        partial.unlink(missing_ok=True)
        code = getattr(exc, "errno", None)
        if code == errno.ENOSPC or "No space left" in str(exc):
            raise ConfigError(f"{file}: the disk is full; make room and run the same command again to go on") from exc
        if isinstance(exc, OSError):
            raise ConfigError(f"{file}: cannot be written: {exc}") from exc
        raise
