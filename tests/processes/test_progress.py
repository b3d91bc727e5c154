"""Progress is shown while a start is waited for, also without a terminal."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from bough.processes.launch import PendingProcesses
from bough.processes.progress import ERASE_LINE, Progress, activation
from bough.runtime.log_lines import report


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def told(stream: io.StringIO) -> str:
    progress = Progress(stream)
    for tenths in range(121):
        names = ("index",) if tenths < 10 else ("target worker (reading weights)", "orchestrator")
        progress(PendingProcesses(names, tenths / 10))
    progress.clear()
    return stream.getvalue()


def test_without_a_terminal_there_is_a_line_every_few_seconds_and_none_for_a_quick_start() -> None:
    """A log had six lines, each of which waited 0 or 1 s."""
    late = "for target worker (reading weights), orchestrator"
    assert told(io.StringIO()).splitlines() == [f"waiting 5 s {late}", f"waiting 10 s {late}"]


def test_on_a_terminal_one_line_changes_every_second_and_disappears_at_the_end() -> None:
    text = told(Terminal())
    assert "\n" not in text
    lines = text.split(ERASE_LINE)
    assert lines[-1] == ""
    assert lines[1] == "waiting 0 s for index"
    assert lines[-2] == "waiting 12 s for target worker (reading weights), orchestrator"


def test_a_workers_progress_is_one_line_without_control_characters() -> None:
    """Its tokenizer, of which a token is quoted, may be anyone's."""
    stream = io.StringIO()
    Progress(stream)(PendingProcesses(("target (token \x1b[2J\n)",), 6.0))
    assert stream.getvalue() == "waiting 6 s for target (token \\x1b[2J\\n)\n"


def test_a_table_is_logged_in_lines_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    report("memory:\n  target\x1b[2J 1 GB")
    assert capsys.readouterr().err == "memory:\n  target\\x1b[2J 1 GB\n"


def test_a_line_does_not_wrap() -> None:
    stream = Terminal()
    Progress(stream)(PendingProcesses(("x" * 1000,), 1.0))
    assert len(stream.getvalue()) < 1000


def test_a_user_who_has_not_activated_the_environment_is_shown_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make serve` is run without; the calls that it prints would not be found, or by another Python."""
    python = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", f"{python}3")
    monkeypatch.setenv("PATH", "")
    assert activation() == "", "an environment that has nothing to activate"
    (tmp_path / "activate").touch()
    python.touch(0o755)
    assert activation() == f" (after `source {tmp_path}/activate`)"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert activation() == ""
