"""Opens a checkpoint's files with O_DIRECT where the file system allows it, and detects changes to them."""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path
from typing import NamedTuple

from bough.errors import CheckpointError
from target_worker.link.layer_extents import ALIGNMENT

logger = logging.getLogger(__name__)


class FileState(NamedTuple):
    """Identity and version of a file's contents: changes whenever it is written to or replaced."""

    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, file: Path | int) -> FileState:
        """State of a path or an open descriptor. Raises OSError."""
        status = os.stat(file)
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class OpenFile(NamedTuple):
    """A file that is open for reading."""

    descriptor: int
    is_direct: bool


def open_file(file: Path) -> OpenFile:
    """Open with O_DIRECT if a probing read succeeds, else without. Raises CheckpointError."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, ALIGNMENT) as probe:
                os.preadv(descriptor, [probe], 0)
            return OpenFile(descriptor, True)
        except OSError:
            os.close(descriptor)
    except OSError:
        pass
    logger.warning("%s: the file system refuses O_DIRECT; reading through the page cache", file)
    try:
        return OpenFile(os.open(file, os.O_RDONLY), False)
    except OSError as exc:
        raise CheckpointError(f"{file}: cannot be opened: {exc}") from exc
