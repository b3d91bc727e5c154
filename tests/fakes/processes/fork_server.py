"""Programs that tests start are forked from a process that has imported their libraries.

The imports are most of the processor time that a small program takes to start, and tests start hundreds.
What a forked program is not, a process of its own command line, tests have by `started_anew`, and by the commands that
they run as users do.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from bough.processes import child
from bough.processes.child import open_process as open_real_process
from bough.processes.exit_with_parent import MODULE, PR_SET_PDEATHSIG, start

PROGRAMS = ("target_worker", "draft_worker", "orchestrator")
IMPORTS = (
    *("target_worker.service", "target_worker.worker", "target_worker.simulated"),
    *("draft_worker.service", "draft_worker.worker", "draft_worker.simulated"),
    *("bough.simulation.clock", "bough.simulation.pair", "orchestrator.assembly"),
    "transformers.models.llama.modeling_llama",
)
OWN = (  # variables that concern no program
    *("PYTEST_CURRENT_TEST", "OMP_NUM_THREADS", "OTEL_BSP_SCHEDULE_DELAY", "TORCHINDUCTOR_CACHE_DIR"),
    "TRITON_INTERPRET",  # which tests set when they import torch; programs on a processor use no Triton
)
MAX_MESSAGE = 1 << 17  # bytes; most is the environment
MAX_DESCRIPTORS = 8
END_SECONDS = 10.0


class ForkedProcess:
    """A program that the server has forked, with the methods of `subprocess.Popen` that `bough.processes` calls."""

    def __init__(self, server: Forks, process_id: int) -> None:
        self.pid = process_id
        self.returncode: int | None = None  # exit status, or the negative number of a signal
        self._server = server
        self._lock = threading.Lock()  # a status can be had once

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        with self._lock:
            if self.returncode is None:
                self.returncode = self._server.ask({"status": self.pid})
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        with suppress(ProcessLookupError):  # another thread has its status meanwhile
            if self.poll() is None:
                wait_for_end(os.pidfd_open(self.pid), timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal if the process still runs."""
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process that forks. It imports when it is first wanted, and ends with this one; programs end with it."""

    def __init__(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # the kernel chooses a name that is no file
            listener.listen()
            self.address: bytes = listener.getsockname()
            self._process = start(
                [sys.executable, "-P", __file__],
                # Ctrl-C is meant for pytest, which ends what it has started.
                lambda line: subprocess.Popen(line, stdin=listener, start_new_session=True),
            )

    def close(self) -> None:
        """End the server, and with it what still runs."""
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Forks:
    """A connection to a server: programs of this process are forked by it."""

    def __init__(self, address: bytes) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._requests: socket.socket | None = None
        self._environment = dict(os.environ)  # in which it imports, whenever it starts

    def connect(self) -> None:
        """Connect, if it has not been done; the first that connects has the server import."""
        with self._lock:
            if self._requests is None:
                self._requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._requests.connect(self._address)
                self._requests.send(json.dumps(self._environment).encode())

    def open_process(self, command: Sequence[str], log: Path, variables: Mapping[str, str], held: Sequence[int]) -> Any:
        """As `child.open_process`, which starts what is no program of bough, or would import in another environment."""
        environment = os.environ | variables
        match list(command):
            case [sys.executable, *flags] if tuple(flags[:2]) == MODULE and flags[2] in PROGRAMS:
                program = {"arguments": flags[2:], "environment": environment, "folder": os.getcwd()}
                if self._has_imported_for(flags, environment) and len(json.dumps(program)) < MAX_MESSAGE:
                    with log.open("ab") as stream:
                        return ForkedProcess(self, self.ask(program, (stream.fileno(), *held)))
        return open_real_process(command, log, variables, held)

    def _has_imported_for(self, flags: Sequence[str], environment: Mapping[str, str]) -> bool:
        threads = [each.get("OMP_NUM_THREADS") for each in (environment, self._environment)]  # read by torch's import
        uses_torch = flags[2] != "orchestrator" and not simulates(flags)
        if uses_torch and threads[0] != threads[1]:
            return False
        return environment_of_imports(environment) == environment_of_imports(self._environment)

    def ask(self, request: Mapping[str, Any], held: Sequence[int] = ()) -> Any:
        """The server's answer. Raises OSError if it has ended, as it does where whoever asks was interrupted."""
        self.connect()
        with self._lock:
            assert self._requests is not None, "it has been started"
            try:
                socket.send_fds(self._requests, [json.dumps(request).encode()], held)
                if not (answer := self._requests.recv(MAX_MESSAGE)):
                    raise ConnectionError("the process that forks programs of tests has ended; its errors are above")
            except BaseException:  # the answer may come yet, and would be taken for the next one's
                self._requests.shutdown(socket.SHUT_RDWR)
                raise
            return json.loads(answer)

    def close(self) -> None:
        """Ask for nothing more."""
        if self._requests is not None:
            self._requests.close()


@contextmanager
def forked_programs(address: bytes | None = None, is_certain: bool = True) -> Iterator[None]:
    """While the block runs, programs are forked by the server at an address, or by one of its own.

    Where there certainly are some, the imports begin at once.
    """
    own = ForkServer() if address is None else None
    forks = Forks(own.address if own else address or b"")
    if is_certain:
        forks.connect()
    try:
        with _opened_by(forks.open_process):
            yield
    finally:
        forks.close()
        if own:
            own.close()


def started_anew() -> AbstractContextManager[None]:
    """While the block runs, programs are started as they are in service, with command lines that others can read."""
    return _opened_by(open_real_process)


@contextmanager
def _opened_by(open_process: Any) -> Iterator[None]:
    before, child.open_process = child.open_process, open_process
    try:
        yield
    finally:
        child.open_process = before


def wait_for_end(descriptor: int, timeout: float | None) -> None:
    """Wait until the process of a pidfd, which is closed, has ended, at most these seconds."""
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(None if timeout is None else timeout * 1000)
    finally:
        os.close(descriptor)


def simulates(flags: Sequence[str]) -> bool:
    """Whether a worker with these flags has no weights."""
    return any(flag == "--simulate" and profile for flag, profile in pairwise(flags))


def environment_of_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment may concern what is imported: programs read their own settings when they run."""
    settings = tuple(f"BOUGH_{program.partition('_')[0].upper()}_" for program in PROGRAMS)
    return {name: value for name, value in environment.items() if name not in OWN and not name.startswith(settings)}


def main() -> None:
    """Fork each requested program and report its process id, or report the exit status of an earlier one."""
    listener = socket.socket(fileno=os.dup(0))
    callers = [new_caller(listener)]
    importlib.import_module("bough.model.architecture.light_imports").import_transformers()  # as workers do
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    # OpenBLAS has a thread from its import on, and sees to it at a fork.
    assert threading.active_count() == 1, "a process must not fork once it has threads of its own"
    server_id = os.getpid()
    while True:
        for ready in select.select([listener, *callers], [], [])[0]:
            if ready is listener:
                callers.append(new_caller(listener))
                continue
            message, held, _, _ = socket.recv_fds(ready, MAX_MESSAGE, MAX_DESCRIPTORS)
            if not message:
                callers.remove(ready)
                ready.close()
                continue
            request = json.loads(message)
            if "status" in request:
                answer = exit_status(request["status"])
            elif (answer := os.fork()) == 0:
                for each in (listener, *callers):
                    each.close()
                become(request, held[0], server_id)
                return
            for descriptor in held:
                os.close(descriptor)
            with suppress(OSError):  # whoever asked has ended
                ready.send(json.dumps(answer).encode())


def new_caller(listener: socket.socket) -> socket.socket:
    """The next connection, whose environment, which is that of all, becomes this process's own."""
    caller, _ = listener.accept()
    os.environ.update(json.loads(caller.recv(MAX_MESSAGE)))
    return caller


def exit_status(process_id: int) -> int | None:
    """A forked program's exit status; None while it runs. The kernel reports a status once, and then forgets it."""
    ended, status = os.waitpid(process_id, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def become(program: Mapping[str, Any], log: int, parent_id: int) -> None:
    """Run a program as `bough.processes.child` starts it: in a session of its own, until its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_id:
        return
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for opened, descriptors in ((nothing, (0,)), (log, (1, 2))):
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    sys.argv = program["arguments"]
    gc.enable()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    sys.stdout.flush()
    threading._shutdown()  # as at the end of any program
    atexit._run_exitfuncs()
    os._exit(0)  # without taking apart all that the server has imported


if __name__ == "__main__":
    gc.disable()
    main()
