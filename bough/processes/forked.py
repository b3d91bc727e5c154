"""Processes that another process has forked and left to this one, which starts and watches them all the same."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from bough.processes.exit_with_parent import MODULE, start

PR_SET_CHILD_SUBREAPER = 36
PRELOADER = "bough.model.preload"
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Program:
    """What a forked process is to run, as `python -m MODULE ARGUMENTS` would."""

    module: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str]  # of its environment, beside ours
    log: str


class ForkedProcess:
    """What `subprocess.Popen` is to a child that this process has started: the same methods for one left to it."""

    def __init__(self, process_id: int) -> None:
        self.pid = process_id
        self.returncode: int | None = None  # the negative number of a signal that ended it
        self._lock = threading.Lock()  # a status can be had once

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        with self._lock, suppress(ChildProcessError):
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status when it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        """To a process that still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Asks it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it."""
        self.send_signal(signal.SIGKILL)


class Preloader:
    """A process that imports what workers share, forks them, and ends (see `bough.model.preload`)."""

    def __init__(self, programs: Sequence[Program], log: Path) -> None:
        """Starts it. Raises OSError where the system lets no process adopt others."""
        self.programs = tuple(programs)
        _adopt_orphans(True)
        command = [sys.executable, *MODULE, PRELOADER, *(program.module for program in programs)]
        with log.open("ab") as stream:
            self._process = start(
                command,
                lambda line: subprocess.Popen(
                    line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, start_new_session=True
                ),
            )
        assert self._process.stdin is not None, "it was opened"
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps([asdict(program) for program in programs]).encode())

    def has_ended(self) -> bool:
        """Whether the workers are there, or will not be."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """It forks no more; what it has forked by then is left to this process like all else."""
        self._process.kill()
        self._process.wait()

    def forked(self) -> Sequence[ForkedProcess]:
        """One process a program, in their order; none where it failed. To be called once, after it has ended."""
        assert self._process.stdout is not None, "it was opened"
        with self._process.stdout as stdout:
            line = stdout.read()
        _adopt_orphans(False)
        return [ForkedProcess(process_id) for process_id in json.loads(line)] if line.endswith(b"\n") else []


def _adopt_orphans(adopts: bool) -> None:
    """Whether children of a child that ends are left to this process. Raises OSError where that is not known here."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None or prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0) != 0:
        raise OSError("the system lets no process adopt others")
