"""`python -m bough.processes.exit_with_parent PARENT COMMAND...` runs a command that ends with its parent.

It is a separate program instead of code between fork and exec (`preexec_fn`): with such code `subprocess` forks, which
is not safe in a process that runs gRPC.

The kernel watches the *thread* that started the child, not its process. `start` therefore starts every child from one
thread that lives as long as the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

PR_SET_PDEATHSIG = 1
MODULE = ("-P", "-m")  # Python flags: -P ignores the working directory, which may hold another copy of `bough`

_STARTER = ThreadPoolExecutor(1, "starts-processes")  # its thread begins with the first child

Process = subprocess.Popen[bytes]
OpenProcess = Callable[[list[str]], Process]  # starts a command line, with any pipes and environment


def start(command: Sequence[str], open_process: OpenProcess = subprocess.Popen) -> Process:
    """Start `command` so that it ends with this process; may be called from any thread.

    `open_process` gets the command line to run, as in `lambda command: subprocess.Popen(command, stdout=log)`; its
    exceptions are raised here.
    """
    wrapped = python("bough.processes.exit_with_parent", str(os.getpid()), *command)
    return _STARTER.submit(open_process, wrapped).result()


def python(module: str, *arguments: str) -> list[str]:
    """The command line of a Python module."""
    return [sys.executable, *MODULE, module, *arguments]


def run(
    command: Sequence[str], open_process: OpenProcess = subprocess.Popen, timeout_seconds: float | None = None
) -> int:
    """Start `command` like `start`, wait, and return its exit status, or the negative number of a signal.

    Raises:
        subprocess.TimeoutExpired: it took longer and was killed.
    """
    process = start(command, open_process)
    try:
        return process.wait(timeout_seconds)
    except BaseException:
        process.kill()
        process.wait()
        raise


def main() -> None:
    """Ask the kernel for SIGTERM when the parent's thread ends, which stays in force after exec, and exec the command.

    Raises:
        SystemExit: the parent has ended already.
    """
    parent_id, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_id:
        raise SystemExit("the parent has ended already")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
