"""Files that hold secrets, or say who has one: read only where others cannot, written only for their owner."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

from bough.errors import ConfigError

FORBIDDEN = stat.S_IWGRP | stat.S_IRWXO  # a group may read: Kubernetes mounts secrets so


class Stamp(NamedTuple):
    """Changes whenever a file is written anew, or another takes its place."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int


def read_private(setting: str, path: str) -> tuple[str, Stamp]:
    """The text of a file.

    Raises:
        ConfigError: naming the setting: the file is not there, is no text, or is open to others.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            status = os.fstat(stream.fileno())
            if status.st_mode & FORBIDDEN:
                mode = stat.S_IMODE(status.st_mode)
                raise ConfigError(f"{setting}: {path} must be closed to others (chmod 600), got mode {mode:o}")
            return stream.read(), stamp_of(status)
    except OSError as exc:
        raise ConfigError(f"{setting}: {path} must be a file that can be read, got: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{setting}: {path} must be text in UTF-8") from exc


def stamp_of(status: os.stat_result) -> Stamp:
    """Of an open file or a path."""
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def write_private(setting: str, path: str, text: str) -> None:
    """Puts a file, which only its owner can read, in the place of another, whole or not at all.

    Raises:
        ConfigError: naming the setting.
    """
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(draft, target)
    except OSError as exc:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"{setting}: {path} must be a file that can be written, got: {exc.strerror}") from exc
