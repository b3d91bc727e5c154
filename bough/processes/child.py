"""A process that was started on this machine: how it is, how it ended, and what it said last."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bough.processes.forked import ForkedProcess
from bough.registry.records import WorkerRecord

TAIL_LINES = 12  # of a log, when its process ends too early
TAIL_BYTES = 8192  # of a log, in which they are looked for
KINDS = {"target_worker": "target", "draft_worker": "draft", "orchestrator": "orchestrator"}  # in the index, by name
STARTED = 19  # where /proc/PID/stat has the start, counted from the state on: field 22 of proc(5)
LOG_PREFIX = re.compile(r"[\d-]+ [\d:,]+ [A-Z]+ [\w.]+: ")  # see `bough.telemetry.logs`
DRAIN_SECONDS = 1.0  # after SIGTERM, before another one: who ends everything does not wait for streams to finish
STOP_SECONDS = 10.0  # after that, before SIGKILL


def named(name: str) -> str:
    """A process's name as people read it."""
    return name.replace("_", " ")


def message_of(line: str) -> str:
    """What a line of a log says, in whichever format."""
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(line)["message"])
    return LOG_PREFIX.sub("", line, count=1).strip()


def process_name(process_id: int) -> str:
    """Its number and when it started, in the kernel's ticks: a number comes again, on other machines even at once.

    The number alone where the process is not there any more.
    """
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return str(process_id)
    return f"{process_id}-{fields[STARTED]}"


@dataclass(frozen=True, slots=True)
class Child:
    """A process that was started here, and where it logs to."""

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str]  # of its environment, beside ours
    log: Path
    process: subprocess.Popen[bytes] | ForkedProcess
    process_name: str  # as in the name by which the index knows it

    @classmethod
    def of(
        cls,
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
        process: subprocess.Popen[bytes] | ForkedProcess,
    ) -> Child:
        """A process that was just started, and nobody has waited for: its number is nobody else's yet."""
        return cls(name, tuple(command), variables, log, process, process_name(process.pid))

    @property
    def title(self) -> str:
        """Its name as people read it."""
        return named(self.name)

    def has_ended(self) -> bool:
        """Whether it is over, whatever the reason."""
        return self.process.poll() is not None

    def how_it_ended(self) -> str:
        """Its exit status or the signal that killed it, in words."""
        status = self.process.returncode
        if status is not None and status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self._lines()[-TAIL_LINES:])

    def last_line(self) -> str:
        """What it logged last, without the time; empty where it logged nothing."""
        lines = [line for line in self._lines() if line.strip()]
        return message_of(lines[-1]) if lines else ""

    def is_of(self, record: WorkerRecord) -> bool:
        """Whether a record in the index is this process's own, and not that of one before it or beside it."""
        kind = KINDS.get(self.name)
        return record.kind == kind and record.worker_id.startswith(f"{kind}-{self.process_name}-")

    def _lines(self) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()


def end(children: Sequence[Child]) -> None:
    """An idle process ends with the first signal, one that drains with the second (see `bough.processes.process`)."""
    for patience_seconds in (DRAIN_SECONDS, STOP_SECONDS):
        for child in children:
            if not child.has_ended():
                child.process.terminate()
        _wait(children, patience_seconds)
    for child in children:
        if not child.has_ended():
            child.process.kill()
            child.process.wait()


def _wait(children: Sequence[Child], patience_seconds: float) -> None:
    deadline = time.monotonic() + patience_seconds
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
