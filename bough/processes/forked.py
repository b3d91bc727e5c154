"""Processes forked by a preloader that has imported their libraries, and then adopted by this process."""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bough.processes.exit_with_parent import MODULE, end_with_parent, start

PR_SET_CHILD_SUBREAPER = 36
PRELOADER = "bough.model.preload"
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Program:
    """The program of a forked process, the same as `python -m MODULE ARGUMENTS`."""

    module: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str]  # environment variables in addition to ours
    log: str


class ForkedProcess:
    """An adopted process, with the methods of `subprocess.Popen`."""

    def __init__(self, process_id: int) -> None:
        self.pid = process_id
        self.returncode: int | None = None  # exit status, or the negative number of a signal
        self._lock = threading.Lock()  # a status can be collected only once

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        with self._lock:
            if self.returncode is None:
                try:
                    ended, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # somebody else has collected it: unknown is 0, as in subprocess
                    ended, status = self.pid, 0
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal if the process still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Preloader:
    """A process that imports the libraries of all workers, forks the workers, and ends (see `bough.model.preload`)."""

    def __init__(self, programs: Sequence[Program], log: Path) -> None:
        """Start the preloader. Raises OSError if the system does not support adopting processes."""
        self.programs = tuple(programs)
        adopt_orphans(True)
        command = [sys.executable, *MODULE, PRELOADER, *(program.module for program in programs)]
        with log.open("ab") as stream:
            self._process = start(
                command,
                lambda line: subprocess.Popen(
                    line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, start_new_session=True
                ),
            )
        assert self._process.stdin is not None, "it was opened as a pipe"
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps([asdict(program) for program in programs]).encode())

    def has_ended(self) -> bool:
        """Whether it has forked the workers, or failed."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the preloader; workers that it has forked already are adopted."""
        self._process.kill()
        self._process.wait()

    def forked(self) -> Sequence[ForkedProcess]:
        """The forked processes in the order of the programs, or none on failure. Call it once, after it has ended."""
        assert self._process.stdout is not None, "it was opened as a pipe"
        with self._process.stdout as stdout:
            line = stdout.read()
        adopt_orphans(False)
        return [ForkedProcess(process_id) for process_id in json.loads(line)] if line.endswith(b"\n") else []


def become(program: Mapping[str, Any], adopter: int) -> None:
    """Run a Program as `python -m` would, in its own session, in a forked process that `adopter` has adopted."""
    end_with_parent(adopter)
    os.setsid()
    for path, flags, descriptors in (
        (os.devnull, os.O_RDONLY, (0,)),
        (program["log"], os.O_WRONLY | os.O_APPEND, (1, 2)),
    ):
        opened = os.open(path, flags)
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.update(program["variables"])
    sys.argv = [program["module"], *program["arguments"]]
    runpy.run_module(program["module"], run_name="__main__", alter_sys=True)


def adopt_orphans(adopts: bool) -> None:
    """Set whether this process adopts orphaned grandchildren. Raises OSError if not supported."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None or prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0) != 0:
        raise OSError("the system does not support PR_SET_CHILD_SUBREAPER")
