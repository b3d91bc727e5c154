"""`python -m bough.processes.exit_with_parent PARENT COMMAND...` runs a command that ends with its parent.

It is a separate program and no code between fork and exec (`preexec_fn`), as forking a process that runs gRPC is not
safe and `subprocess` does not fork without such code.

The kernel watches the *thread* that started the child, not its process. `start` therefore starts every child from one
thread that lasts as long as the process.
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

Process = subprocess.Popen[bytes]
OpenProcess = Callable[[list[str]], Process]  # starts a command line, with any pipes and environment


def start(command: Sequence[str], open_process: OpenProcess = subprocess.Popen) -> Process:
    """Start `command` so that it ends with this process; may be called from any thread.

    `open_process` gets the command line to run, as in `lambda command: subprocess.Popen(command, stdout=log)`; its
    exceptions are raised here.
    """
    wrapped = [sys.executable, *MODULE, "bough.processes.exit_with_parent", str(os.getpid()), *command]
    return _starter.submit(open_process, wrapped).result()


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


def _new_starter() -> ThreadPoolExecutor:
    """The thread that starts all children and lasts as long as the process; it begins with the first one."""
    return ThreadPoolExecutor(1, "starts-processes")


def _renew() -> None:
    """After a fork: the child lacks the parent's thread."""
    global _starter
    _starter = _new_starter()


_starter = _new_starter()
os.register_at_fork(after_in_child=_renew)


def end_with_parent(parent_id: int) -> None:
    """Ask the kernel for SIGTERM when the parent thread ends.

    Raises:
        SystemExit: the parent has ended already.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_id:
        raise SystemExit("the parent has ended already")


def main() -> None:
    """Ask for the signal, which survives exec, and exec the command."""
    parent_id, command = int(sys.argv[1]), sys.argv[2:]
    end_with_parent(parent_id)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
