"""A process that `bough up` or a Ray Serve replica supervises: its state, its log, its end and its restarts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

from bough.concurrency.tasks import came_true
from bough.errors import ConfigError
from bough.processes.exit_with_parent import start
from bough.registry.records import WorkerRecord

logger = logging.getLogger(__name__)

TAIL_LINES = 12  # last lines of a log that errors quote
TAIL_BYTES = 8192  # bytes at the end of a log that are searched for these lines
LOG_PREFIX = re.compile(r"[\d-]+ [\d:,]+ [A-Z]+ [\w.]+: ")  # see `bough.telemetry.logs`
LINE_LENGTH = 200  # characters of a log's last line that a report quotes
DRAIN_SECONDS = 1.0  # between the first SIGTERM, which drains, and the second, which stops
STOP_SECONDS = 10.0  # between the second SIGTERM and SIGKILL
KILLED_SECONDS = 60.0  # after SIGKILL; a process inside a driver's call may survive it for ever


def named(name: str) -> str:
    """A process's name for display."""
    return name.replace("_", " ")


def message_of(line: str) -> str:
    """The message of a log line in text or JSON format."""
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(line)["message"])
    return LOG_PREFIX.sub("", line, count=1).strip()


def start_ticks(process: int | str = "self") -> int:
    """When a process was started, in clock ticks since boot: field 22 of proc(5). Raises OSError if it has ended."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])


def process_name(process_id: int) -> str:
    """The process id and start time in kernel ticks, as ids are reused; the id alone if the process has ended."""
    try:
        return f"{process_id}-{start_ticks(process_id)}"
    except OSError:
        return str(process_id)


@dataclass(frozen=True, slots=True)
class Child:
    """A started process and its log."""

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str]  # environment variables in addition to this process's
    log: Path
    process: subprocess.Popen[bytes]
    process_name: str  # part of its id in the index

    @property
    def title(self) -> str:
        """The process's name for display."""
        return named(self.name)

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    def how_it_ended(self) -> str:
        """Describes its exit status or the signal that killed it."""
        status = self.process.returncode
        if status is not None and status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def ending(self) -> str:
        """One line with the process, how it ended, and its last log line."""
        line = self.last_line()[:LINE_LENGTH]
        return f"{self.title} {self.how_it_ended()}" + (f"; its last line was: {line}" if line else "")

    def describe_end(self) -> str:
        """How it ended, and the last lines of its log."""
        return f"{self.name} {self.how_it_ended()}; the last lines of {self.log}:\n{self.tail()}"

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self._lines()[-TAIL_LINES:])

    def last_line(self) -> str:
        """The last line of its log without prefix; empty if there is none."""
        lines = [line for line in self._lines() if line.strip()]
        return message_of(lines[-1]) if lines else ""

    def is_of(self, record: WorkerRecord) -> bool:
        """Whether a record in the index belongs to this process."""
        kind = self.name.removesuffix("_worker")
        return record.kind == kind and record.worker_id.startswith(f"{kind}-{self.process_name}-")

    def _lines(self) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When an ended process is restarted: exponential backoff and a limit of consecutive restarts."""

    first_pause_seconds: float = 0.5  # doubled for each consecutive restart
    longest_pause_seconds: float = 30.0
    max_in_a_row: int = 5  # consecutive restarts; after these it is not restarted again
    steady_seconds: float = 60.0  # seconds of service that reset the count

    def pause_seconds(self, number: int) -> float | None:
        """Seconds before the consecutive restart `number`, counted from 1; None if there is none."""
        if number > self.max_in_a_row:
            return None
        return min(self.first_pause_seconds * 2.0 ** (number - 1), self.longest_pause_seconds)


class Restarts:
    """Counts consecutive ends of a process."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self.num_ends = 0  # in a row
        self._served_since = inf  # on the monotonic clock; inf while it does not serve

    def served(self) -> None:
        """Record that the process serves from now on."""
        self._served_since = time.monotonic()

    def ended(self) -> float | None:
        """Record an end; returns the seconds until the restart, or None if there is none."""
        was_steady = time.monotonic() - self._served_since >= self.policy.steady_seconds
        self.num_ends = 1 if was_steady else self.num_ends + 1
        self._served_since = inf
        return self.policy.pause_seconds(self.num_ends)


def open_child(
    name: str, command: Sequence[str], log: Path, variables: Mapping[str, str], held: Sequence[int] = ()
) -> Child:
    """Start a process that ends with this one, however that ends; its output is appended to the log.

    It inherits the file descriptors `held`.
    """
    process = open_process(command, log, variables, held)
    return Child(name, tuple(command), variables, log, process, process_name(process.pid))


def open_process(
    command: Sequence[str], log: Path, variables: Mapping[str, str], held: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, for `open_child`. Tests replace this by a fork."""
    with log.open("ab") as stream:
        return start(
            command,
            lambda line: subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                env=os.environ | variables,
                pass_fds=held,
            ),
        )


def open_program(
    name: str,
    command: Sequence[str],
    variables: Mapping[str, str],
    niceness: int = 0,
    log_folder: str = "",
    held: Sequence[int] = (),
) -> Child:
    """Start a program that ends with this process, however that ends; it inherits the file descriptors `held`.

    Only root may lower a niceness. Otherwise the program keeps this process's, with a warning.
    """
    folder = Path(log_folder) if log_folder else temporary_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=f"{name}-", suffix=".log", dir=folder, delete=False) as log:
        child = open_child(name, command, Path(log.name), variables, held)
    try:
        os.setpriority(os.PRIO_PROCESS, child.process.pid, niceness)
    except PermissionError:
        logger.warning("niceness %d is not allowed here; RAY_worker_niceness=%d would give it", niceness, niceness)
    except ProcessLookupError:
        pass
    return child


def temporary_folder() -> Path:
    """Return the folder for logs and locks; create it if missing. Raise ConfigError if another user owns it.

    Its name can be guessed, and another owner could replace the files in it.
    """
    folder = Path(tempfile.gettempdir()) / f"bough-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or (owner := folder.stat().st_uid) != os.getuid():
        found = "a link" if folder.is_symlink() else f"that of user {owner}"
        raise ConfigError(f"{folder}: must be this user's own folder (TMPDIR names another place), got {found}")
    return folder


async def drain(
    children: Sequence[Child], timeout_seconds: float, is_cut_off: Callable[[], bool] = lambda: False
) -> None:
    """Send SIGTERM and wait, without a thread, until all have ended. Afterwards `end` ends those that still run."""

    def is_over() -> bool:
        return all(child.has_ended() for child in children) or is_cut_off()

    if not is_over():
        for child in children:
            child.process.terminate()
        await came_true(is_over, timeout_seconds)


def end(children: Sequence[Child], drain_seconds: float = DRAIN_SECONDS) -> None:
    """End processes: SIGTERM to drain, SIGTERM to stop (see `bough.processes.process`), then SIGKILL."""
    for timeout_seconds in (drain_seconds, STOP_SECONDS):
        for child in children:
            if not child.has_ended():
                child.process.terminate()
        _wait(children, timeout_seconds)
    for child in children:
        if not child.has_ended():
            child.process.kill()
    _wait(children, KILLED_SECONDS)


async def stop_program(child: Child, drain_seconds: float, log_folder: str = "") -> None:
    """Let a program drain for `drain_seconds`, and end it (see `end`).

    The log is deleted after exit status 0, unless `log_folder` asks to keep logs.
    """
    if child.has_ended():
        return
    await drain([child], drain_seconds)
    await asyncio.to_thread(end, [child], 0.0)
    if child.process.returncode == 0 and not log_folder:
        child.log.unlink(missing_ok=True)


def _wait(children: Sequence[Child], timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
