"""Both workers of a machine are forked from one process that has imported for them, and are children like any other."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bough.processes.forked import ForkedProcess, Preloader, Program
from bough.processes.launch import Cluster
from tests.conftest import settings
from tests.processes.test_exit_with_parent import ended

SHARED_BYTES = 80_000_000  # far less than what torch, transformers and numba take
PRINTS = "import os; print(os.environ['WORD'], os.getppid(), os.getsid(0) == os.getpid())"
SLEEPS = "import time; time.sleep(600)"


def python(statement: str, log: Path, **variables: str) -> Program:
    """A program that runs a statement once."""
    log.touch()
    return Program("timeit", ("-n1", "-r1", statement), variables, str(log))


def shared_dirty_bytes(process_id: int) -> int:
    """Pages without a file that a process shares with another, as it has since a fork."""
    text = Path(f"/proc/{process_id}/smaps_rollup").read_text()
    return sum(int(size) * 1024 for size in re.findall(r"^Shared_Dirty: +(\d+) kB", text, re.MULTILINE))


async def test_workers_that_run_models_share_what_they_import(tiny_cluster: Cluster) -> None:
    for name in ("target_worker", "draft_worker"):
        process = tiny_cluster.children[name].process
        assert isinstance(process, ForkedProcess)
        assert shared_dirty_bytes(process.pid) > SHARED_BYTES


def test_a_status_that_somebody_else_collected_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for a process that runs, and sent signals, which whoever has its number next would get."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    monkeypatch.setattr(os, "kill", lambda *call: pytest.fail(f"kill{call}"))
    forked = ForkedProcess(process.pid)
    forked.kill()
    assert forked.poll() == forked.wait() == 0


def test_forked_programs_are_children_with_logs_variables_and_statuses(tmp_path: Path) -> None:
    logs = [tmp_path / name for name in ("prints", "fails", "sleeps")]
    programs = [
        python(PRINTS, logs[0], WORD="hello"),
        Program("target_worker", ("--model", "/nowhere", "--threads", "-1"), {}, str(logs[1])),
        python(SLEEPS, logs[2]),
    ]
    logs[1].touch()
    preloader = Preloader(programs, tmp_path / "preload")
    assert not preloader.has_ended()
    preloader._process.wait()  # a machine may be busy; pytest ends a test that hangs
    prints, fails, sleeps = preloader.forked()
    try:
        assert prints.wait() == 0
        assert f"hello {os.getpid()} True" in logs[0].read_text()
        assert fails.wait() == 2
        assert "--threads" in logs[1].read_text()
        assert sleeps.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            sleeps.wait(0.0)
        sleeps.terminate()
        assert sleeps.wait() == sleeps.returncode == -signal.SIGTERM
        sleeps.kill()  # of one that has ended, whose id may be another's by now
    finally:
        sleeps.kill()


def test_what_was_forked_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    code = f"""if True:
        from pathlib import Path
        from bough.processes.forked import Preloader, Program
        program = Program("timeit", ("-n1", "-r1", {SLEEPS!r}), {{}}, {os.devnull!r})
        preloader = Preloader([program], Path({os.devnull!r}))
        preloader._process.wait()
        print(preloader.forked()[0].pid, flush=True)
        {SLEEPS}
    """
    asking = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert asking.stdout is not None
        forked = int(asking.stdout.readline())
        assert not ended(forked, 0)
    finally:
        asking.kill()
        asking.communicate()
    assert ended(forked)


def test_a_preloader_that_was_killed_has_forked_nothing(tmp_path: Path) -> None:
    preloader = Preloader([python(SLEEPS, tmp_path / "sleeps")], tmp_path / "preload")
    preloader.kill()
    assert list(preloader.forked()) == []


def test_where_none_can_be_forked_each_worker_starts_on_its_own(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preloader died of something: what it is, the workers say themselves."""

    class Failed:
        programs = ()

        def has_ended(self) -> bool:
            return True

        def forked(self) -> list[ForkedProcess]:
            return []

    started: list[str] = []
    monkeypatch.setattr("bough.processes.launch.Preloader", lambda *_: Failed())
    monkeypatch.setattr(Cluster, "start", lambda _, name, *__: started.append(name))
    cluster = Cluster(settings(tiny, tiny, drops="2"), tmp_path)
    cluster.start_all()
    assert started == ["index", "orchestrator"]
    cluster._adopt_workers()
    assert started[2:] == ["target_worker", "draft_worker"]


@pytest.mark.parametrize("flags", [("--device", "cuda"), ("--resident-layers", "-1")])
def test_no_process_is_forked_that_may_know_of_a_gpu_or_must_come_later(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    started: list[str] = []
    monkeypatch.setattr(Cluster, "start", lambda _, name, *__: started.append(name))
    Cluster(settings(tiny, tiny, *flags, drops="2"), tmp_path).start_all()
    assert "draft_worker" in started
