"""What is waited for is said while it is waited for, also where nobody sees a line change."""

from __future__ import annotations

import io

from bough.cli.machine.progress import ERASE_LINE, Progress
from bough.processes.launch import Waiting


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def told(stream: io.StringIO) -> str:
    progress = Progress(stream)
    for tenths in range(121):
        names = ("index",) if tenths < 10 else ("target worker (reading weights)", "orchestrator")
        progress(Waiting(names, tenths / 10))
    progress.clear()
    return stream.getvalue()


def test_without_a_terminal_there_is_a_line_at_each_change_and_every_few_seconds() -> None:
    late = "for target worker (reading weights), orchestrator"
    assert told(io.StringIO()).splitlines() == [
        "waiting 0 s for index", f"waiting 1 s {late}", f"waiting 6 s {late}", f"waiting 11 s {late}",
    ]  # fmt: skip


def test_on_a_terminal_one_line_changes_with_the_seconds_and_is_gone_at_the_end() -> None:
    text = told(Terminal())
    assert "\n" not in text
    lines = text.split(ERASE_LINE)
    assert lines[-1] == ""
    assert lines[1] == "waiting 0 s for index"
    assert lines[-2] == "waiting 12 s for target worker (reading weights), orchestrator"


def test_a_line_does_not_wrap() -> None:
    stream = Terminal()
    Progress(stream)(Waiting(("x" * 1000,), 1.0))
    assert len(stream.getvalue()) < 1000
