"""Orchestrators and simulated workers of tests are forked from a process that has imported their libraries.

The imports take most of a second of processor time; tests in all start a hundred such processes.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from bough.processes import launch
from bough.processes.child import open_process as launch_process
from bough.processes.exit_with_parent import start
from bough.processes.forked import ForkedProcess, Program, adopt_orphans, become

MODULES = (
    *("target_worker.service", "target_worker.simulated", "draft_worker.service", "draft_worker.simulated"),
    *("bough.simulation.line", "bough.simulation.pair", "orchestrator.assembly"),
)
ADOPTED_SECONDS = 0.0005  # between two checks of the parent


class ForkServer:
    """The process that forks, which starts when it is first wanted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._surroundings = surroundings()

    def open_process(
        self, command: Sequence[str], log: Path, variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        """As `launch.open_process`, which starts what is to have other surroundings than MODULES were imported in."""
        program = program_of(command, log, variables)
        if program is None or surroundings() != self._surroundings:
            return launch_process(command, log, variables)
        log.touch()
        with self._lock:
            adopt_orphans(True)
            try:
                return ForkedProcess(int(self._answer(json.dumps(asdict(program)))))
            finally:
                adopt_orphans(False)

    def _answer(self, line: str) -> bytes:
        if self._process is None:
            pipe, server = subprocess.PIPE, [sys.executable, "-P", __file__]
            self._process = start(server, lambda command: subprocess.Popen(command, stdin=pipe, stdout=pipe))
        assert self._process.stdin is not None, "it was opened as a pipe"
        assert self._process.stdout is not None, "it was opened as a pipe"
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def close(self) -> None:
        """End the server; what it has forked goes on."""
        if self._process is not None:
            self._process.communicate()


@contextmanager
def forked_programs() -> Iterator[None]:
    """While the block runs, clusters start orchestrators and simulated workers by a ForkServer."""
    server = ForkServer()
    launch.open_process = server.open_process
    try:
        yield
    finally:
        launch.open_process = launch_process
        server.close()


def program_of(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> Program | None:
    """The program of a command line; None if MODULES are not what it imports."""
    match list(command):
        case [sys.executable, "-P", "-m", module, *flags] if module == "orchestrator" or any(
            flag == "--simulate" and profile for flag, profile in pairwise(flags)
        ):
            return Program(module, tuple(flags), variables, str(log))
    return None


def surroundings() -> tuple[str, dict[str, str]]:
    """Working directory and environment of this process, but for what pytest says there of the test."""
    return os.getcwd(), {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def main() -> None:
    """Fork each program of standard input, and print its process id once it is a child of the asking process."""
    adopter = os.getppid()
    importlib.import_module("bough.model.cpu.jit").interpret()  # as simulated workers do
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, "a process must not fork once it has threads of its own"
    while line := sys.stdin.readline():
        if (forked := os.fork()) == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)  # which leaves the program to whoever adopts orphans
            while os.getppid() == between:
                time.sleep(ADOPTED_SECONDS)
            print(os.getpid(), flush=True)
            become(json.loads(line), adopter)
            return
        os.waitpid(forked, 0)


if __name__ == "__main__":
    main()
