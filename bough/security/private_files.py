"""Files with secrets: read only if closed to others, and written for their owner only."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from bough.errors import ConfigError

FORBIDDEN = stat.S_IWGRP | stat.S_IRWXO  # a group may read, as with Kubernetes secrets


def read_file(setting: str, path: str, *, is_public: bool = False) -> str:
    """Read a file that must be closed to others, unless it `is_public`, as a certificate is.

    Raises:
        ConfigError: names the setting: the file is missing, not text, or open to others.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            if mode & FORBIDDEN and not is_public:
                raise ConfigError(f"{setting}: {path} must be closed to others (chmod 600), got mode {mode:o}")
            return stream.read()
    except OSError as exc:
        raise ConfigError(f"{setting}: {path} must be a file that can be read, got: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{setting}: {path} must be text in UTF-8") from exc


def write_private(setting: str, path: str, text: str) -> None:
    """Replace a file atomically by one that only its owner can read; one that is there keeps its owner, group and mode.

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
        raise ConfigError(f"{setting}: {path} must be a file that can be written, got: {exc.strerror}") from exc


def _keep_owner(descriptor: int, before: Path) -> None:
    """Have a file's owner, group and mode for its successor, as a process that reads it is often another user's."""
    with suppress(FileNotFoundError):
        status = before.stat()
        try:
            os.fchown(descriptor, status.st_uid, status.st_gid)
        except PermissionError as exc:
            owner = f"user {status.st_uid}, group {status.st_gid}"
            raise PermissionError(exc.errno, f"no right to keep its owner ({owner}), which root has") from exc
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~FORBIDDEN)
