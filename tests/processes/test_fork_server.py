"""Programs forked by tests begin, end and are ended like those that are started without forking."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from bough.processes.child import Child, end, open_child
from bough.processes.exit_with_parent import python
from bough.processes.launch import LOCAL
from tests.fakes.processes.fork_server import ForkedProcess, forked_programs, started_anew
from tests.fakes.simulated import write_profile
from tests.fakes.tiers import long_but

pytestmark = pytest.mark.pipeline

SECONDS = 60


@pytest.fixture(params=long_but(["forked"], ["forked", "started anew"]))
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    with nullcontext() if request.param == "forked" else started_anew():  # as it is in all tests, or in service
        yield request.param


def opened(folder: Path, *flags: str, name: str = "orchestrator", held: Sequence[int] = ()) -> Child:
    return open_child(name, python(name, *flags), folder / "log", {}, held)


def serving(folder: Path, index_url: str, held: Sequence[int] = ()) -> Child:
    """An orchestrator that listens."""
    flags = ("--index-url", index_url, "--namespace", folder.name, "--host", LOCAL, "--port", "0", "--http-port", "-1")
    child = opened(folder, *flags, held=held)
    waited(child, f" at {LOCAL}:")
    return child


def waited(child: Child, text: str) -> None:
    """Waits until the log has a text."""
    deadline = time.monotonic() + SECONDS
    while text not in child.tail():
        assert time.monotonic() < deadline, child.tail()
        assert not child.has_ended(), child.tail()
        time.sleep(0.05)


def test_a_program_runs_in_its_own_session_until_it_is_ended(tmp_path: Path, index_url: str, kind: str) -> None:
    child = serving(tmp_path, index_url)
    assert isinstance(child.process, ForkedProcess) == (kind == "forked")
    assert os.getsid(child.process.pid) == child.process.pid
    with pytest.raises(subprocess.TimeoutExpired):
        child.process.wait(0.01)
    end([child])
    assert child.process.returncode == 0


def test_errors_are_in_its_log_and_its_status_is_reported(tmp_path: Path, kind: str) -> None:
    child = opened(tmp_path, "--port", "many")
    assert child.process.wait(SECONDS) == 2
    assert child.how_it_ended() == "ended with status 2"
    assert "port" in child.last_line()


def test_a_fatal_signal_is_reported(tmp_path: Path, kind: str) -> None:
    child = opened(tmp_path, "--simulate", str(write_profile(tmp_path)), "--port", "0", name="target_worker")
    child.process.kill()
    assert child.process.wait(SECONDS) == -signal.SIGKILL
    assert child.how_it_ended() == "was killed by SIGKILL"


def test_it_inherits_descriptors(tmp_path: Path, index_url: str, kind: str) -> None:
    """As the lock of a GPU, which is held while any process has it open."""
    reader, writer = os.pipe()
    child = serving(tmp_path, index_url, (writer,))
    os.close(writer)
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):  # some process might still write
        os.read(reader, 1)
    child.process.kill()
    child.process.wait(SECONDS)
    assert os.read(reader, 1) == b""
    os.close(reader)


@pytest.mark.long
def test_forked_programs_end_with_the_server(tmp_path: Path, index_url: str) -> None:
    with forked_programs():
        child = serving(tmp_path, index_url)
        descriptor = os.pidfd_open(child.process.pid)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(SECONDS * 1000), "it still runs"
    os.close(descriptor)


def test_all_threads_waiting_for_a_program_get_its_status(tmp_path: Path, index_url: str) -> None:
    child = serving(tmp_path, index_url)
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(child.process.wait, SECONDS) for _ in range(8)]
        child.process.terminate()
        assert {each.result() for each in waiting} == {0}


def test_a_program_with_another_environment_is_started_without_forking(tmp_path: Path, index_url: str) -> None:
    command = python("orchestrator", "--index-url", index_url, "--port", "many")
    for variables, is_forked in (({"BOUGH_ORCHESTRATOR_DRAFT": "none"}, True), ({"GRPC_VERBOSITY": "DEBUG"}, False)):
        child = open_child("orchestrator", command, tmp_path / "log", variables)
        assert child.process.wait(SECONDS) == 2
        assert isinstance(child.process, ForkedProcess) == is_forked
