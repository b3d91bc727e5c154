"""A log has the lines that processes write, and no others: what callers send cannot add one, or colour a terminal."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from dataclasses import replace

import pytest

from bough.client import Client
from bough.errors import Unavailable
from bough.processes.child import LOG_PREFIX
from bough.protocol.messages import VerifyCall
from bough.runtime.log_lines import MAX_LOG_CHARACTERS, MAX_TRACE_LINES, on_one_line
from bough.telemetry.logs import JsonFormatter, TextFormatter
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


def test_a_message_is_one_line_whatever_is_in_it() -> None:
    line = logged("session %s moves", FORGED)
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert r"x\n2026-01-01" in line
    assert line.encode()
    assert on_one_line("añ 木 🌳") == "añ 木 🌳"


def test_a_message_has_an_end() -> None:
    assert len(logged("%s", "\0" * 1_000_000)) < 4 * MAX_LOG_CHARACTERS + 200
    assert "(1000000 characters)" in logged("%s", "x" * 1_000_000)


def test_lines_of_a_trace_begin_as_no_line_of_a_log_does() -> None:
    try:
        raise ValueError(FORGED * 200 + "x" * 1_000_000)
    except ValueError:
        lines = logged("it failed", exc_info=True).splitlines()
    assert 3 < len(lines) <= MAX_TRACE_LINES + 1
    assert [line for line in lines if LOG_PREFIX.match(line)] == lines[:1]
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) < 8 * MAX_LOG_CHARACTERS


async def test_the_name_of_a_session_adds_no_line(fakes: Fleet, caplog: pytest.LogCaptureFixture) -> None:
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
