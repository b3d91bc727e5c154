"""Processors and memory that this process may use, within the limits of its control groups.

In a container, /proc/meminfo and `os.cpu_count` show the whole node; the limits are in its control groups (cgroups(7))
of version 1 or 2 and in all groups above. Paths are below `root`, so that tests can fake a machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
SHARE = 0.8  # default share of free memory for a process
GPU_DEVICES = ("nvidia[0-9]*", "dxg", "kfd", "nvhost-gpu")  # files in /dev for CUDA, WSL2, ROCm and Jetson
RESERVE_BYTES = 300 * 1000**2  # always left free, for stacks, kernels, buffers and other processes


def usable_cpus(root: Path = ROOT, affinity: int = 0) -> int:
    """Processors on which this process may run all the time, at least 1.

    These are the processors of its affinity (`affinity`, or by the system), limited by CPU quotas of control groups.
    Fractions are rounded down, as a group that exhausts its quota is stopped with all its threads.
    """
    cpus = affinity or _affinity()
    for folder, is_version_2 in _groups("cpu", root):
        quota, period = _cpu_quota(folder, is_version_2)
        if quota > 0 and period > 0:
            cpus = min(cpus, quota // period)
    return max(cpus, 1)


def free_memory(root: Path = ROOT) -> int:
    """Bytes that this process may still allocate, within the machine and all its control groups.

    Unmapped page cache is reclaimable and counts as free.
    """
    free = _meminfo(root)["MemAvailable"]
    for folder, is_version_2 in _groups("memory", root):
        limit_names = ("memory.max", "memory.high") if is_version_2 else ("memory.limit_in_bytes",)
        limits = [limit for name in limit_names if (limit := _number(folder / name)) is not None]
        used = _number(folder / ("memory.current" if is_version_2 else "memory.usage_in_bytes"))
        if limits and used is not None:
            free = min(free, min(limits) - max(0, used - _reclaimable(folder / "memory.stat")))
    return max(free, 0)


def default_budget(free: int) -> int:
    """The default budget, in bytes, of a process on a machine with `free` bytes."""
    return max(0, min(int(free * SHARE), free - RESERVE_BYTES))


def may_be_gpu(device: str, root: Path = ROOT) -> bool:
    """Whether a worker with the setting `--device` may compute on a GPU, judged without torch."""
    is_here = any(path for name in GPU_DEVICES for path in (root / "dev").glob(name))
    return device.startswith("cuda") or (device == "auto" and is_here)


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_quota(folder: Path, is_version_2: bool) -> tuple[int, int]:
    """CPU quota and period in microseconds; 0 or less if unlimited."""
    if not is_version_2:
        return _number(folder / "cpu.cfs_quota_us") or 0, _number(folder / "cpu.cfs_period_us") or 0
    words = _text(folder / "cpu.max").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 and words[0].isdecimal() else (0, 0)


def _meminfo(root: Path) -> dict[str, int]:
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) >= 2}


def _reclaimable(stat: Path) -> int:
    """Bytes of unmapped page cache of a control group; 0 if unknown.

    Mapped pages do not count: they are mostly libraries in use, which would be read from disk again at once.
    """
    values = dict(line.split() for line in _text(stat).splitlines() if len(line.split()) == 2)
    prefix = "total_" if "total_inactive_file" in values else ""  # version 1: totals include child groups

    def size(name: str) -> int:
        return int(values.get(prefix + name, 0))

    mapped = size("file_mapped") or size("mapped_file")
    return max(0, size("inactive_file") + size("active_file") - mapped) + size("slab_reclaimable")


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """(folder, whether version 2) of the control groups of this process, from its own upwards."""
    mounts = list(_mounts(root))
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        is_version_2 = controllers == ""
        if not is_version_2 and controller not in controllers.split(","):
            continue
        kind, wanted = ("cgroup2", "") if is_version_2 else ("cgroup", controller)
        for mount_kind, options, mounted, where in mounts:
            if mount_kind == kind and (not wanted or wanted in options):
                yield from ((folder, is_version_2) for folder in _upwards(path, mounted, root / where.lstrip("/")))
                break


def _upwards(path: str, mounted: str, where: Path) -> Iterator[Path]:
    """A group's folder and all mounted folders above it; the mount point alone if the group is not below it.

    `mounted` is the group mounted at `where`: in a container often its own, although `path` starts at the root.
    """
    below = path.removeprefix(mounted.rstrip("/"))
    is_below = path.startswith(mounted) and ".." not in path
    folder = where / below.strip("/") if is_below and (where / below.strip("/")).is_dir() else where
    while folder != where:
        yield folder
        folder = folder.parent
    yield where


def _mounts(root: Path) -> Iterator[tuple[str, list[str], str, str]]:
    """(type, options, mounted group, mount point) of each mount of control groups (proc_pid_mountinfo(5))."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) >= 5 and len(rest) >= 3 and rest[0] in ("cgroup", "cgroup2"):
            yield rest[0], rest[2].split(","), fields[3], fields[4]


def _number(file: Path) -> int | None:
    """The number in a file; None if the file is missing or has no number (no limit)."""
    text = _text(file).strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def _text(file: Path) -> str:
    """The text of a file; empty if missing, as on other systems or for disabled controllers."""
    try:
        return file.read_text()
    except OSError:
        return ""
