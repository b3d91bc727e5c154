"""`python -m bough.processes.exit_with_parent PARENT COMMAND...`: becomes the command, and ends with its parent.

A program of its own rather than code between fork and exec: forking a process in which gRPC runs is not safe, and
without such code `subprocess` does not fork.

What the kernel watches is the *thread* that started the child, not the process: a child that a pool's thread started
got SIGTERM when that thread ended. `start` therefore starts every child from one thread that lasts as long as the
process does.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

PR_SET_PDEATHSIG = 1
MODULE = ("-P", "-m")  # for Python: not from the folder that one happens to be in, where `bough` may be a clone of ours

Result = TypeVar("Result")
Process = subprocess.Popen[bytes]
OpenProcess = Callable[[list[str]], Process]  # given a command line, with the pipes and variables of one's choice


def start(command: Sequence[str], open_process: OpenProcess = subprocess.Popen) -> Process:
    """Starts `command` so that it ends with this process; may be called from any thread of any process.

    `open_process` is given the command line to run, as in `lambda command: subprocess.Popen(command, stdout=log)`; what
    it raises is raised here.
    """
    return _starter().call(lambda: open_process(_tethered(command)))


def _tethered(command: Sequence[str]) -> list[str]:
    """A command line for the command that watches the thread which starts it."""
    return [sys.executable, *MODULE, "bough.processes.exit_with_parent", str(os.getpid()), *command]


def run(
    command: Sequence[str], open_process: OpenProcess = subprocess.Popen, timeout_seconds: float | None = None
) -> int:
    """Starts `command` as `start` does, and waits: its exit status, or the negative number of the signal that ended it.

    Raises:
        subprocess.TimeoutExpired: it took longer, and has been killed.
    """
    process = start(command, open_process)
    try:
        return process.wait(timeout_seconds)
    except BaseException:
        process.kill()
        process.wait()
        raise


class _Starter:
    """A thread that ends with the process and not before: a daemon, which the interpreter does not wait for."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="starts-processes", daemon=True).start()

    def call(self, function: Callable[[], Result]) -> Result:
        """The function's result, on this thread."""
        answer: Future[Result] = Future()
        self._calls.put((function, answer))
        return answer.result()

    def _run(self) -> None:
        while True:
            function, answer = self._calls.get()
            try:
                answer.set_result(function())
            except BaseException as exc:  # whoever called hears of it; the thread must not end
                answer.set_exception(exc)
            del function, answer  # they are not kept until the next call


_lock = threading.Lock()
_current: _Starter | None = None


def _starter() -> _Starter:
    """That of this process, made when it is first wanted."""
    global _current
    with _lock:
        _current = _current or _Starter()
        return _current


def _forget() -> None:
    """In a process that was forked: it has none of its parent's threads, one of which may have held the lock."""
    global _current, _lock
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def end_with_parent(parent_id: int) -> None:
    """Asks the kernel for SIGTERM at the death of the thread that is the parent.

    Raises:
        SystemExit: the parent is another process, as this one's has ended already.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_id:
        raise SystemExit("the parent has ended already")


def main() -> None:
    """Becomes the command; what the kernel was asked for outlives the exec."""
    parent_id, command = int(sys.argv[1]), sys.argv[2:]
    end_with_parent(parent_id)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
