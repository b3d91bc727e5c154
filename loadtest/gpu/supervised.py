"""Runs parts of a check with time limits in a process that is restarted when a part fails.

After a CUDA error a process cannot use its GPU any more, and a hanging kernel ends only with its process; a restart
keeps one part's failure from affecting the others. Without failures, one process runs all parts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple

MARK = "##result "  # prefix of result lines; other lines are for people
READY = "ready"  # part name of a process's first result
START_SECONDS = 90.0  # limit of a process's imports
LONGEST_SECONDS = 24 * 3600.0  # limit of a part without one
NUM_LAST_LINES = 3  # printed lines quoted if a process ends without a result


class Part(NamedTuple):
    """A part of a check."""

    name: str
    seconds: float  # time limit


def is_outcome(value: Any, kind: str) -> bool:
    """Whether a part's value says only that it was "skipped", or what its "error" was in miniature."""
    return isinstance(value, dict) and value.keys() == {kind}


class PartError(Exception):
    """A part failed or exceeded its time limit."""


Keep = Callable[[Any], None]  # keeps what a part has found so far, or in the end


def say(part: str, **result: Any) -> None:
    """Print a part's result: a value, what it has found so far, or an error, after which the process ends."""
    print(MARK + json.dumps({"part": part, **result}), flush=True)


def results_of(
    parts: Sequence[Part],
    command: Callable[[Sequence[str], dict[str, Any]], Sequence[str]],
    seconds: float,
    note: Callable[[dict[str, Any], dict[str, str]], None] = lambda *_: None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run all parts; returns results by part, and errors of the failed parts, within about `seconds`.

    `command` starts a process that runs parts by name; it is given the results so far. What a failed part had found
    until then is a result too. `note` is called with both whenever there is more of them.
    """
    ends, left = monotonic() + seconds, list(parts)
    found, failed = dict[str, Any](), dict[str, str]()
    while left and monotonic() < ends:
        with _Worker(command([part.name for part in left], found)) as worker:
            part = Part(READY, START_SECONDS if ends < math.inf else math.inf)
            try:
                worker.result(part, ends)
                while left:
                    part = left.pop(0)

                    def keep(value: Any, name: str = part.name) -> None:
                        found[name] = value
                        note(found, failed)

                    keep(worker.result(part, ends, keep))
                    print(json.dumps({part.name: found[part.name]}), flush=True)
            except PartError as exc:
                if part.name == READY:  # a restart would fail as well
                    part = left.pop(0)
                failed[part.name] = str(exc)
                note(found, failed)
                print(f"{part.name}: {exc}", flush=True)
    return found, failed | {part.name: "not started: no time was left" for part in left}


class _Worker:
    """A process that runs parts, with its process group."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._last = deque[str](maxlen=NUM_LAST_LINES)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with its child processes
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def result(self, part: Part, ends: float, keep: Keep = lambda _: None) -> Any:
        """The result of the next part; `keep` is called with what it has found so far. Raises PartError."""
        began = monotonic()
        limit = max(0.0, min(part.seconds, ends - began))
        while True:
            try:
                line = self._lines.get(timeout=min(LONGEST_SECONDS, max(0.0, began + limit - monotonic())))
            except queue.Empty:
                raise PartError(f"no result within {limit:.0f} seconds") from None
            if line is None:
                last = "; ".join(self._last) or "it printed nothing"
                raise PartError(f"its process ended with status {self._process.wait()}: {last}")
            if line.startswith(MARK):
                self._last.clear()
                result = json.loads(line.removeprefix(MARK))
                if "so_far" not in result:
                    return self._value(part, result)
                keep(result["so_far"])
                continue
            self._last.append(line)
            print(line, flush=True)

    def _value(self, part: Part, result: dict[str, Any]) -> Any:
        if result["part"] != part.name:
            raise PartError(f"{result['part']} ran instead")
        if "error" in result:
            raise PartError(result["error"])
        return result.get("value")
