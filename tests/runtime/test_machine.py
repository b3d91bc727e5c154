"""What a process may use: the nearest limit wins, of the machine, of its affinity, and of every control group above."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bough.config.processes import TargetConfig, parse
from bough.runtime.machine import default_budget, free_memory, may_be_gpu, usable_cpus
from loadtest.common.limits import limited

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
MEMORY_LIMIT = 1_500_000_000


class FakeMachine:
    """A tree of files like /proc and /sys."""

    def __init__(self, root: Path, mounts: str, groups: str, free_kib: int = 8_000_000) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 9900000 kB\nMemAvailable:    {free_kib} kB\n")
        self.write("proc/self/mountinfo", f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n{mounts}")
        self.write("proc/self/cgroup", groups)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_without_limits_the_whole_machine_is_available(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, V2_MOUNT, "0::/\n")
    machine.write("sys/fs/cgroup/memory.max", "max\n")
    machine.write("sys/fs/cgroup/memory.current", "5000\n")
    machine.write("sys/fs/cgroup/cpu.max", "max 100000\n")
    assert free_memory(tmp_path) == 8_192_000_000
    assert usable_cpus(tmp_path, affinity=6) == 6


def test_a_machine_without_control_groups_is_measured(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable: 1000 kB\n")
    assert free_memory(tmp_path) == 1_024_000
    assert usable_cpus(tmp_path, affinity=3) == 3
    assert usable_cpus(tmp_path) == len(os.sched_getaffinity(0))


def test_limits_of_version_2_groups_and_their_parents_apply(tmp_path: Path) -> None:
    """A pod's limit applies to its containers, whatever their own files say."""
    machine = FakeMachine(tmp_path, V2_MOUNT, "0::/pod/box\n")
    machine.write("sys/fs/cgroup/pod/box/memory.max", "3000000000\n")
    machine.write("sys/fs/cgroup/pod/box/memory.current", "1000000000\n")
    machine.write("sys/fs/cgroup/pod/box/cpu.max", "max 100000\n")
    assert free_memory(tmp_path) == 2_000_000_000
    machine.write("sys/fs/cgroup/pod/memory.max", "4000000000\n")
    machine.write("sys/fs/cgroup/pod/memory.current", "2500000000\n")
    machine.write("sys/fs/cgroup/pod/cpu.max", "250000 100000\n")
    assert free_memory(tmp_path) == 1_500_000_000
    assert usable_cpus(tmp_path, affinity=8) == 2
    machine.write("sys/fs/cgroup/pod/box/memory.high", "2000000000\n")
    assert free_memory(tmp_path) == 1_000_000_000, "beyond it a group is slowed down to a crawl"
    machine.write("sys/fs/cgroup/pod/box/memory.current", "2100000000\n")
    assert free_memory(tmp_path) == 0
    machine.write("sys/fs/cgroup/pod/box/cpu.max", "50000 100000\n")
    assert usable_cpus(tmp_path, affinity=8) == 1, "half a processor is one"


def test_limits_of_version_1_groups_and_their_parents_apply(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, V1_MOUNTS, "5:memory:/pod/box\n4:cpu,cpuacct:/pod/box\n0::/\n")
    memory, cpu = "sys/fs/cgroup/memory/pod", "sys/fs/cgroup/cpu,cpuacct/pod"
    machine.write(f"{memory}/box/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    machine.write(f"{memory}/box/memory.usage_in_bytes", "1000000000\n")
    machine.write(f"{memory}/memory.limit_in_bytes", "3000000000\n")
    machine.write(f"{memory}/memory.usage_in_bytes", "1200000000\n")
    machine.write(f"{cpu}/box/cpu.cfs_quota_us", "-1\n")
    machine.write(f"{cpu}/box/cpu.cfs_period_us", "100000\n")
    machine.write(f"{cpu}/cpu.cfs_quota_us", "300000\n")
    machine.write(f"{cpu}/cpu.cfs_period_us", "100000\n")
    assert free_memory(tmp_path) == 1_800_000_000
    assert usable_cpus(tmp_path, affinity=8) == 3
    assert usable_cpus(tmp_path, affinity=2) == 2


def test_limits_of_a_container_mounted_as_the_root_apply(tmp_path: Path) -> None:
    """Its path begins at the machine's root, of which it sees nothing."""
    mounts = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    machine = FakeMachine(tmp_path, mounts, "4:memory:/docker/abc/inner\n0::/\n")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000000\n")
    machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "500000000\n")
    assert free_memory(tmp_path) == 1_500_000_000
    machine.write("sys/fs/cgroup/memory/inner/memory.limit_in_bytes", "1000000000\n")
    machine.write("sys/fs/cgroup/memory/inner/memory.usage_in_bytes", "500000000\n")
    assert free_memory(tmp_path) == 500_000_000
    machine.write("proc/self/cgroup", "4:memory:/docker/abcdef\n")
    assert free_memory(tmp_path) == 1_500_000_000, "a neighbour's name begins alike"
    machine.write("proc/self/cgroup", "4:memory:/../other\n")
    assert free_memory(tmp_path) == 1_500_000_000


@pytest.mark.parametrize("version", [1, 2])
def test_file_pages_are_free_unless_they_are_mapped(version: int, tmp_path: Path) -> None:
    if version == 2:
        machine, folder = FakeMachine(tmp_path, V2_MOUNT, "0::/box\n"), "sys/fs/cgroup/box"
        machine.write(f"{folder}/memory.max", "3000000000\n")
        machine.write(f"{folder}/memory.current", "2000000000\n")
        stat = "anon 7\nfile 9\nfile_mapped 200000000\nactive_file 300000000\ninactive_file 600000000\n"
        stat += "slab_reclaimable 50000000\n"
    else:
        machine, folder = FakeMachine(tmp_path, V1_MOUNTS, "4:memory:/box\n"), "sys/fs/cgroup/memory/box"
        machine.write(f"{folder}/memory.limit_in_bytes", "3000000000\n")
        machine.write(f"{folder}/memory.usage_in_bytes", "2000000000\n")
        stat = "inactive_file 1\nmapped_file 1\ntotal_mapped_file 150000000\n"
        stat += "total_inactive_file 600000000\ntotal_active_file 300000000\n"
    machine.write(f"{folder}/memory.stat", stat)
    assert free_memory(tmp_path) == 1_750_000_000


def test_affinity_sets_the_default_number_of_threads() -> None:
    code = "from bough.config.processes import TargetConfig, parse; "
    code += "print(parse(TargetConfig, 't', ['--model', 'm'], {}).threads)"
    one = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", one, sys.executable, "-c", code]
    try:
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        pytest.skip("taskset is not here")
    assert output.strip() == "1"
    assert parse(TargetConfig, "t", ["--model", "m"], {}).threads == usable_cpus()


def test_limits_of_a_real_control_group_apply() -> None:
    code = "from bough.runtime.machine import free_memory; print(free_memory())"
    try:
        with limited(MEMORY_LIMIT) as prefix:
            command = [*prefix, sys.executable, "-c", code]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except OSError as exc:
        pytest.skip(f"control groups cannot be made here: {exc}")
    assert MEMORY_LIMIT // 2 < int(output) < MEMORY_LIMIT


def test_memory_is_left_to_others_by_default() -> None:
    """A fifth of the free memory, but at least what every process uses besides its budget."""
    assert default_budget(10 * 1000**3) == 8 * 1000**3
    assert default_budget(1000**3) == 700 * 1000**2
    assert default_budget(200 * 1000**2) == 0


def test_a_gpu_is_found_by_its_device_files(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    assert [may_be_gpu(device, tmp_path) for device in ("auto", "cpu", "cuda:1")] == [False, False, True]
    (tmp_path / "dev" / "nvidia0").touch()
    assert [may_be_gpu(device, tmp_path) for device in ("auto", "cpu", "cuda:1")] == [True, False, True]
