"""A log has the lines that processes write, and no others: what callers send cannot add one, or colour a terminal."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sys
from dataclasses import replace

import pytest
from starlette.responses import PlainTextResponse

from bough.client import Client
from bough.errors import Unavailable
from bough.processes.child import LOG_PREFIX
from bough.protocol.messages import VerifyCall
from bough.runtime.log_lines import (
    MAX_LINES_A_MINUTE,
    MAX_LOG_CHARACTERS,
    MAX_TRACE_LINES,
    SparingFilter,
    on_one_line,
    say,
    say_error,
    shown,
)
from bough.telemetry.logs import ABOUT_CLIENTS, JsonFormatter, TextFormatter
from orchestrator.http_api.server import http_serving
from tests.fakes.fleet import Fleet
from tests.fakes.streams import OPTIONS, PROMPT, read

FORGED = "x\n2026-01-01 00:00:00,000 INFO bough.processes: target ready\r\x1b[31m\x1b]0;x\a\u2028\u202e\x85\ud800"


def logged(message: str, *args: object, exc_info: bool = False) -> str:
    record = logging.LogRecord("n", logging.ERROR, "f", 1, message, args, sys.exc_info() if exc_info else None)
    line = TextFormatter().format(record)
    told = JsonFormatter().format(record)
    assert told.isprintable()
    assert len(told) < 20 * MAX_LOG_CHARACTERS * (MAX_TRACE_LINES if exc_info else 1)
    assert json.loads(told)["level"] == "ERROR"
    return line


def test_a_message_is_one_line() -> None:
    line = logged("session %s moves", FORGED)
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert r"x\n2026-01-01" in line
    assert line.encode()
    assert on_one_line("añ 木 🌳") == "añ 木 🌳"


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def test_a_models_text_has_no_control_characters_on_a_terminal_and_is_complete_in_a_file() -> None:
    """A model may be asked to say anything, and a worker may answer any tokens."""
    text = "añ 木 👩\u200d🚀 שלום\tx\n"
    assert shown(text, Terminal()) == text
    assert shown("a\x1b[2J\r\x9b1m\u202eb\u2066", Terminal()) == r"a\x1b[2J\r\x9b1m\u202eb\u2066"
    assert shown("a\r\nb\r", Terminal()) + shown("\nc", Terminal()) == "a\nb\nc"
    assert shown(FORGED, io.StringIO()) == FORGED


def test_printed_texts_have_as_many_lines_as_given(capsys: pytest.CaptureFixture[str]) -> None:
    say("first", "", FORGED, "x" * 1_000_000)
    first, second, third, fourth, end = capsys.readouterr().out.split("\n")
    assert (first, second, end) == ("first", "", "")
    assert third == on_one_line(FORGED)
    assert len(fourth) < 2 * MAX_LOG_CHARACTERS
    say_error("it ended:\nlast \x1b[31mline")
    assert capsys.readouterr().err == "error: it ended:\n    | last \\x1b[31mline\n"


def test_the_length_of_a_message_is_limited() -> None:
    assert len(logged("%s", "\0" * 1_000_000)) < 4 * MAX_LOG_CHARACTERS + 200
    assert "(1000000 characters)" in logged("%s", "x" * 1_000_000)


def test_lines_of_a_traceback_differ_from_log_lines() -> None:
    try:
        raise ValueError(FORGED * 200 + "x" * 1_000_000)
    except ValueError:
        lines = logged("it failed", exc_info=True).splitlines()
    assert 3 < len(lines) <= MAX_TRACE_LINES + 1
    assert [line for line in lines if LOG_PREFIX.match(line)] == lines[:1]
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) < 8 * MAX_LOG_CHARACTERS


async def test_a_sessions_name_adds_no_line(fakes: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """A session's move is logged by its name, and a name may be anything that is text."""
    name = FORGED.replace("\ud800", "")
    lost: list[str] = []

    async def fail_for_good(call: VerifyCall) -> None:
        if not lost:
            lost.append(call.worker_id)
        if call.worker_id == lost[0]:
            raise Unavailable("gone")

    for worker_id in ("t1", "t2"):
        target, _ = await fakes.target(worker_id)
        target.before = fail_for_good
    _, server = await fakes.orchestrator(num_targets=2)
    async with asyncio.timeout(60), Client(server.address) as client:
        await read(client, replace(OPTIONS, session_id=name), PROMPT)
    told = [record for record in caplog.records if "x\n2026" in record.getMessage()]
    assert told, "no line has the name of a session any more: another test would do"
    for record in told:
        assert len(re.findall("[\r\n\x1b\u2028]", TextFormatter().format(record))) == 0


def test_no_client_can_fill_the_disk_with_log_lines() -> None:
    """An invalid request caused one or two log lines, for anyone who reached the port; so did a failed handshake."""
    now, told = [1000.0], list[str]()
    sparing = SparingFilter(("clients",), lambda: now[0])

    def log(logger: str, lineno: int) -> None:
        record = logging.LogRecord(logger, logging.WARNING, "f", lineno, "no: %s", ("x%",), None)
        if sparing.filter(record):
            told.append(record.getMessage())

    for _ in range(1000):
        log("clients", 1)
    log("clients", 2)
    assert told == ["no: x%"] * (MAX_LINES_A_MINUTE + 1)
    for _ in range(1000):
        log("inside", 1)
    assert len(told) == MAX_LINES_A_MINUTE + 1001
    now[0] += 60.0
    del told[:]
    log("clients", 1)
    log("clients", 1)
    log("clients", 2)
    assert told == [f"no: x% ({1000 - MAX_LINES_A_MINUTE} such lines before were left out)", "no: x%", "no: x%"]


async def test_log_lines_about_clients_are_rate_limited(caplog: pytest.LogCaptureFixture) -> None:
    async with http_serving("127.0.0.1", 0, PlainTextResponse("ok")) as port:
        for request in (b"no\n\n", b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            async with asyncio.timeout(30):
                await reader.readline()
            writer.close()
    names = {record.name for record in caplog.records if record.levelno >= logging.WARNING}
    assert names
    assert names <= set(ABOUT_CLIENTS)
