"""Files that are whole or not there, and the folders that they stand in."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from bough.errors import ConfigError

_FULL = "the disk is full; make room and run the same command again to go on"
_UNWRITABLE = "a folder that can be written to would do"
REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "raise the limit for files (`ulimit -f`) and run the same command again to go on",
    errno.EIO: "the disk or the way to it fails; another disk would do",
    errno.EROFS: _UNWRITABLE,
    errno.EACCES: _UNWRITABLE,
    errno.EPERM: _UNWRITABLE,
}
OTHERWISE = "another folder would do"
PARTIAL = ".partial"  # the end of the name of a file that is being written


def make_folder(flag: str, folder: Path) -> None:
    """A folder to write to, and those around it.

    Raises:
        ConfigError: naming the flag: a file is in the way, or it may not be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"{flag}: {folder} cannot be made: {exc.strerror}; another folder would do") from exc


def is_taken(folder: Path) -> bool:
    """Whether a folder holds anything but what `replace` left of a process that was killed while it wrote."""
    return folder.is_dir() and any(not file.name.endswith(PARTIAL) for file in folder.iterdir())


def replace(file: Path, write: Callable[[Path], Any], content: str = "") -> None:
    """Writes a file at once or not at all; `content` is what it holds, in the words of an error.

    Raises:
        ConfigError: the disk is full, or will not be written to; with the system's reason.
    """
    partial = file.with_name(file.name + PARTIAL)
    try:
        write(partial)
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        partial.replace(file)
    except Exception as exc:
        with suppress(OSError):  # where nothing can be written any more, the first error is the one to tell
            partial.unlink(missing_ok=True)
        if not isinstance(exc, OSError | SafetensorError):
            raise
        what = f"{file}: {content}" if content else f"{file}:"
        raise ConfigError(f"{what} cannot be written: {exc}; {REMEDIES.get(_code(exc), OTHERWISE)}") from exc


def _code(error: OSError | SafetensorError) -> int:
    """The system's number of what went wrong, which safetensors has in its words alone; 0 where there is none."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else 0
