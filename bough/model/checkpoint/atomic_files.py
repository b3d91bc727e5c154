"""Atomic writing of files, and folders to write to."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from bough.errors import ConfigError

_FULL = "the disk is full; make room and run the same command again to continue"
_UNWRITABLE = "choose a folder that can be written to"
REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "raise the limit for files (`ulimit -f`) and run the same command again to continue",
    errno.EIO: "the disk or its connection fails; choose another disk",
    errno.EROFS: _UNWRITABLE,
    errno.EACCES: _UNWRITABLE,
    errno.EPERM: _UNWRITABLE,
}
OTHERWISE = "choose another folder"
PARTIAL = ".partial"  # suffix of a file that is being written


def make_folder(flag: str, folder: Path) -> None:
    """Create a folder with its parents.

    Raises:
        ConfigError: names the flag: a file is in the way, or permission is missing.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"{flag}: {folder} cannot be created: {exc.strerror}; choose another folder") from exc


def replace(file: Path, write: Callable[[Path], Any], content: str = "") -> None:
    """Write a file atomically; `content` describes it in error messages.

    Raises:
        ConfigError: the disk is full or cannot be written to, with the system's reason.
    """
    partial = file.with_name(f"{file.name}.{uuid.uuid4().hex}{PARTIAL}")  # other processes may be writing the same file
    try:
        partial.touch()
        mode = partial.stat().st_mode  # of a new file; safetensors' files are readable only by their owner
        write(partial)
        partial.chmod(mode)
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        partial.replace(file)
    except BaseException as exc:
        with suppress(OSError):  # report the first error
            partial.unlink(missing_ok=True)
        if not isinstance(exc, OSError | SafetensorError):
            raise
        what = f"{file}: {content}" if content else f"{file}:"
        known = (code for code in REMEDIES if getattr(exc, "errno", None) == code or f"(os error {code})" in str(exc))
        remedy = REMEDIES.get(next(known, 0), OTHERWISE)  # safetensors' errors have the number only in the message
        raise ConfigError(f"{what} cannot be written: {exc}; {remedy}") from exc
