"""SHA-256 digests of whole files, cached on disk so that a checkpoint is hashed once and not at each start."""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from bough.config.cache_paths import cache_folder
from bough.errors import CheckpointError, ConfigError
from bough.model.checkpoint.atomic_files import make_folder, replace
from target_worker.link.open_files import FileState, open_file

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 * 1024 * 1024  # of one read


def file_digest(file: Path, state: FileState, before_piece: Callable[[], None] = lambda: None) -> str:
    """SHA-256 of a file in this state, as `sha256sum` prints it; cached.

    `before_piece` is called before each read and may block. The page cache keeps nothing of what is read, except where
    O_DIRECT is refused and pages of this file are dropped. Raises CheckpointError for a file that cannot be read, or is
    no longer in this state.
    """
    digest, opened = hashlib.sha256(), open_file(file)
    try:
        _require(file, opened.descriptor, state)
        with mmap.mmap(-1, PIECE_BYTES) as room:
            offset = 0
            while offset < state.size:
                before_piece()
                count = os.preadv(opened.descriptor, [room], offset)
                if count == 0:
                    break  # the check of the state below reports truncation
                digest.update(memoryview(room)[:count])
                if not opened.is_direct:
                    os.posix_fadvise(opened.descriptor, offset, count, os.POSIX_FADV_DONTNEED)
                offset += count
        _require(file, opened.descriptor, state)
    except OSError as exc:
        raise CheckpointError(f"{file}: cannot be read: {exc}") from exc
    finally:
        os.close(opened.descriptor)
    _remember(file, state, digest.hexdigest())
    return digest.hexdigest()


def known_digest(file: Path, state: FileState) -> str | None:
    """The cached digest of a file in this state; None if there is none."""
    try:
        found = _entry(file, state).read_text()
    except (OSError, ValueError):
        return None
    return found if re.fullmatch("[0-9a-f]{64}", found) else None


def whole_digest(digests: Mapping[Path, str]) -> str:
    """Hash of all files of a checkpoint by their names in its folder: the same on every machine."""
    lines = sorted(f"{digest} {file.name}\n" for file, digest in digests.items())
    return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()


def _require(file: Path, descriptor: int, state: FileState) -> None:
    if FileState.of(descriptor) != state:
        raise CheckpointError(f"{file}: has been written to, or replaced, since the model was opened")


def _remember(file: Path, state: FileState, digest: str) -> None:
    entry = _entry(file, state)
    try:
        make_folder("BOUGH_CACHE_DIR", entry.parent)
        replace(entry, lambda partial: partial.write_text(digest))
    except ConfigError as exc:
        logger.warning("%s; the weights are read again at the next start", exc)


def _entry(file: Path, state: FileState) -> Path:
    """Path of a cached digest, derived from the file's path and state."""
    name = hashlib.blake2b(f"{os.path.realpath(file)}\n{tuple(state)}".encode(), digest_size=16).hexdigest()
    return cache_folder() / "weights" / f"{name}.sha256"
