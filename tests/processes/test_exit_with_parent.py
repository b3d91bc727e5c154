"""Children end with the process that started them, and with nothing less than the process."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bough.processes.exit_with_parent import run, start

SLEEP = ["/bin/sleep", "600"]
PATIENCE_SECONDS = 60


@contextmanager
def parent(code: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that runs the code, and the id of the child that it prints; both are gone at the end."""
    program = (
        "import os, subprocess, sys, threading, time\nfrom bough.processes.exit_with_parent import start\n"
        + textwrap.dedent(code)
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = 0
    try:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        yield process, child
    finally:
        process.kill()
        process.communicate()
        if child and not ended(child, 0):
            os.kill(child, 9)


def ended(process_id: int, seconds: float = PATIENCE_SECONDS) -> bool:
    """Whether a process, a child of another, has ended or does so in time."""
    try:
        handle = os.pidfd_open(process_id)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def test_a_child_outlives_the_thread_that_started_it_but_not_the_process() -> None:
    """The kernel watches threads: it got SIGTERM when the thread of a pool ended, though its parent lived."""
    code = f"""
        children = []
        thread = threading.Thread(target=lambda: children.append(start({SLEEP!r})))
        thread.start()
        thread.join()
        while os.path.exists(f"/proc/self/task/{{thread.native_id}}"):
            time.sleep(0.01)
        time.sleep(0.2)
        print(children[0].pid, flush=True)
        children[0].wait()
    """
    with parent(code) as (process, child):
        assert not ended(child, 0)
        process.kill()
        assert ended(child)


def test_many_threads_can_start_children_at_once() -> None:
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda number=number: statuses.append(run(["/bin/sh", "-c", f"exit {number}"])))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == list(range(8))


def test_an_exception_while_opening_is_raised_and_the_next_start_works() -> None:
    def fails(_: list[str]) -> subprocess.Popen[bytes]:
        raise OSError("no pipe")

    with pytest.raises(OSError, match="no pipe"):
        start(SLEEP, fails)
    assert run(["/bin/true"]) == 0


def test_a_start_that_takes_too_long_is_ended() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def open_process(command: list[str]) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command))
        return started[0]

    with pytest.raises(subprocess.TimeoutExpired):
        run(SLEEP, open_process, timeout_seconds=0.5)
    assert started[0].returncode == -9
