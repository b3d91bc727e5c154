"""Opens a checkpoint's files with O_DIRECT where the file system allows it, and detects changes to them."""

from __future__ import annotations

import logging
import mmap
import os
import time
from pathlib import Path
from typing import NamedTuple

from bough.errors import CheckpointError
from target_worker.link.layer_extents import ALIGNMENT

logger = logging.getLogger(__name__)


SETTLED_SECONDS = 5.0  # in which whoever overwrites a file writes to it again


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

    def is_settled(self) -> bool:
        """Whether nobody has written to it for a while; a network file system's clock may be another."""
        return abs(time.time() - self.mtime_ns / 1e9) >= SETTLED_SECONDS


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
