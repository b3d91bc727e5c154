"""Limits memory and disk bandwidth of programs by control groups; needs root.

A machine whose memory holds the whole model can then stand for one whose memory does not. Control groups of version 1
and 2 work.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bough.config.cache_paths import cache_folder

CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def limited(memory_bytes: int = 0, read_bytes_per_second: int = 0, disk_of: Path = Path()) -> Iterator[list[str]]:
    """Prefix of a command that limits it; 0 is no limit, `disk_of` is any path on the disk to limit.

    Raises:
        OSError: control groups are missing, or this user may not use them.
    """
    groups: list[Path] = []
    device = os.stat(disk_of).st_dev
    disk = f"{os.major(device)}:{os.minor(device)}"
    try:
        if (CGROUPS / "cgroup.controllers").is_file():
            group = _new(groups, "")
            _write(CGROUPS / "cgroup.subtree_control", "+memory +io")
            if memory_bytes:
                _write(group / "memory.max", memory_bytes)
            if read_bytes_per_second:
                _write(group / "io.max", f"{disk} rbps={read_bytes_per_second}")
        else:
            if memory_bytes:
                _write(_new(groups, "memory") / "memory.limit_in_bytes", memory_bytes)
            if read_bytes_per_second:
                limit = f"{disk} {read_bytes_per_second}"
                _write(_new(groups, "blkio") / "blkio.throttle.read_bps_device", limit)
        yield _entering(groups)
    finally:
        for group in groups:
            with suppress(OSError):  # a process in it may still be ending
                group.rmdir()


def drop_cached(folder: Path) -> None:
    """Drop a model's files from the page cache, as cached pages are not charged to a limited group."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def can_limit() -> bool:
    """Whether `limited` can limit memory and the disk of the demonstration's models on this machine."""
    try:
        with limited(memory_bytes=1 << 40, read_bytes_per_second=1 << 40, disk_of=cache_folder()):
            return True
    except OSError:
        return False


def _new(groups: list[Path], controller: str) -> Path:
    group = CGROUPS / controller / f"bough-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    groups.append(group)
    return group


def _write(file: Path, value: object) -> None:
    file.write_text(str(value))


def _entering(groups: Sequence[Path]) -> list[str]:
    """A shell command that joins the groups and then executes the command."""
    joins = "".join(f"echo $$ > {group}/cgroup.procs && " for group in groups)
    return ["/bin/sh", "-c", joins + 'exec "$@"', "sh"]
