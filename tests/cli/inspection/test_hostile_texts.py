"""Texts of workers and orchestrators may be anything: they add no line and no control character to a terminal."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from types import ModuleType

import pytest

from bough.cli.main import argument_parser, main
from bough.errors import BoughError, NotFound
from bough.protocol.decision import Decision, DraftCalibration, Mode
from bough.protocol.generation import Loads, ServerInfo, StageStatus, WorkerInfo, WorkerStatus

HOSTILE = "x\nall is well\r\x1b[2J\x1b]0;x\a\x9b31m\u202e\u2066\u2028\x85\x7f"
FIRST = WorkerInfo(
    "target", HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, 1, 1, 1, 1, notes=(HOSTILE,), bough_version=HOSTILE,
    weights_hash=HOSTILE, stages=(StageStatus(HOSTILE, 5, 9, 1),),
)  # fmt: skip
SECOND = replace(FIRST, weights_hash="another")
OTHER = replace(FIRST, kind=HOSTILE)
WORKERS = tuple(WorkerStatus(HOSTILE, info, HOSTILE) for info in (FIRST, SECOND, OTHER))
SERVER = ServerInfo(WORKERS, HOSTILE, HOSTILE, 1, HOSTILE, metrics_url=HOSTILE, http_url=HOSTILE, unreached=(HOSTILE,))


@dataclass
class Hostile:
    """A client of an orchestrator all of whose texts are hostile, its errors too."""

    error: BoughError | None = None
    address: str = HOSTILE

    async def __aenter__(self) -> Hostile:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def server_info(self) -> ServerInfo:
        self._fail()
        return SERVER

    async def loads(self) -> Loads:
        return Loads(0, 0, 0, 0)

    async def calibrations(self) -> tuple[DraftCalibration, ...]:
        return (DraftCalibration(HOSTILE, 1, 1.0, 1.0, 1.0, 1.0),)

    async def decisions(self, session: str = "") -> tuple[Decision, ...]:
        self._fail()
        return (Decision(1, Mode.FIXED, draft_id=HOSTILE),)

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


def command(name: str, monkeypatch: pytest.MonkeyPatch, error: BoughError | None = None) -> ModuleType:
    module = importlib.import_module(f"bough.cli.inspection.{name}")
    monkeypatch.setattr(module, "client_from", lambda *_: Hostile(error))
    return module


def require_lines(text: str) -> list[str]:
    lines = text.removesuffix("\n").split("\n")
    assert [line for line in lines if not line.isprintable()] == []
    assert "all is well" not in lines
    return lines


@pytest.mark.parametrize(
    ("name", "flags", "error"),
    [
        ("doctor", [], None),
        ("doctor", [], NotFound("", HOSTILE)),
        ("top", ["--count", "1"], None),
        ("top", ["--count", "1"], NotFound("", HOSTILE)),
        ("explain", [HOSTILE], None),
    ],
)
async def test_hostile_texts_cannot_forge_lines_of_a_command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    flags: list[str],
    error: BoughError | None,
) -> None:
    module = command(name, monkeypatch, error)
    await getattr(module, name)(argument_parser().parse_args([name, *flags]))
    told = "\n".join(require_lines(capsys.readouterr().out))
    assert r"x\nall is well\r\x1b[2J" in told


def test_an_orchestrators_error_is_printed_as_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command("explain", monkeypatch, NotFound("", HOSTILE))
    with pytest.raises(SystemExit, match="2"):
        main(["explain"])
    first, second = require_lines(capsys.readouterr().err)
    assert first == "error: x"
    assert second.startswith(r"    | all is well\r\x1b[2J")
