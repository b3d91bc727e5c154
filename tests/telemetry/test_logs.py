"""What lines of a log look like, for people and for programs."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from bough.config.processes import OrchestratorConfig, parse
from bough.errors import ConfigError
from bough.processes.child import message_of
from bough.telemetry.call_context import carried
from bough.telemetry.logs import (
    LOG_CONTEXT,
    NOTHING,
    JsonFormatter,
    LogContext,
    TextFormatter,
    configure_logging,
    log_session,
)
from bough.telemetry.tracing import NO_SPAN

ABOUT = LogContext("r 1\n2026-01-01 00:00:00,000 ERROR forged: é", "s=1]", trace_id="ab" * 16)


@pytest.fixture
def about() -> Iterator[None]:
    LOG_CONTEXT.set(ABOUT)
    yield
    LOG_CONTEXT.set(NOTHING)


def written(formatter: logging.Formatter, message: str, *arguments: object, is_error: bool = False) -> str:
    """What a logger with this formatter writes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("bough.test")
    logger.addHandler(handler)
    try:
        raise ValueError("on purpose")
    except ValueError:
        logger.warning(message, *arguments, exc_info=is_error)
    return stream.getvalue().removesuffix("\n")


def test_a_json_line_has_all_known_fields(about: None) -> None:
    line = json.loads(written(JsonFormatter(), "%d of\n%s", 3, "é"))
    told = datetime.fromisoformat(line.pop("time"))
    assert abs((datetime.now(UTC) - told).total_seconds()) < 60
    assert line == {
        "level": "WARNING",
        "logger": "bough.test",
        "message": "3 of\né",
        "request_id": ABOUT.request_id,
        "session_id": ABOUT.session_id,
        "trace_id": ABOUT.trace_id,
    }


def test_an_error_is_one_json_line() -> None:
    text = written(JsonFormatter(), "it failed", is_error=True)
    assert "\n" not in text
    assert json.loads(text)["exception"].endswith("ValueError: on purpose")
    assert not {"request_id", "session_id", "trace_id"} & json.loads(text).keys()


def test_a_text_line_ends_with_its_fields_and_no_name_adds_a_line(about: None) -> None:
    line = written(TextFormatter(), "it goes on")
    assert "\n" not in line
    assert line.endswith(
        " WARNING bough.test: it goes on [request_id=r%201%0A2026-01-01%2000:00:00,000%20ERROR%20forged:%20%C3%A9 "
        f"session_id=s%3D1%5D trace_id={ABOUT.trace_id}]"
    )


def test_a_traceback_follows_a_text_line(about: None) -> None:
    first, *others = written(TextFormatter(), "it failed", is_error=True).splitlines()
    assert first.endswith("]")
    assert others[-1] == "    | ValueError: on purpose"  # set apart from lines of the log


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_watcher_of_a_process_reads_messages_in_either_format(formatter: logging.Formatter) -> None:
    assert message_of(written(formatter, "loading the model")) == "loading the model"


@pytest.mark.parametrize("line", ["plain", '{"a": 1}', "[1]", "17", "null"])
def test_lines_that_are_not_log_lines_are_unchanged(line: str) -> None:
    assert message_of(line) == line


async def test_names_apply_to_a_task_and_its_children() -> None:
    async def request(name: str) -> list[str]:
        LOG_CONTEXT.set(LogContext(name))
        await asyncio.sleep(0)

        async def part() -> str:
            log_session(f"of {name}")
            return written(JsonFormatter(), "x")

        return [await asyncio.create_task(part()), written(JsonFormatter(), "x")]

    answers = await asyncio.gather(request("a"), request("b"))
    for name, (part, whole) in zip("ab", answers, strict=True):
        assert (json.loads(part)["request_id"], json.loads(part)["session_id"]) == (name, f"of {name}")
        assert "session_id" not in json.loads(whole)
    assert "request_id" not in json.loads(written(JsonFormatter(), "x"))


def test_a_request_without_a_name_logs_none() -> None:
    assert carried(NO_SPAN) == ()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--log-level", "LOUD"], "--log-level: must be DEBUG, INFO, WARNING or ERROR, got 'LOUD'"),
        (["--log-format", "xml"], "--log-format: must be text, json, got 'xml'"),
    ],
)
def test_invalid_formats_are_refused_by_name(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure_logging(parse(OrchestratorConfig, "orchestrator", flags, {}))


def test_one_variable_sets_the_format_of_all_processes() -> None:
    assert parse(OrchestratorConfig, "orchestrator", [], {"BOUGH_LOG_FORMAT": "json"}).log_format == "json"


@pytest.mark.parametrize("program", ["orchestrator", "draft_worker", "target_worker", "bough.cli.main"])
def test_grpcs_own_log_level_is_set_before_its_import(program: str) -> None:
    """Every failed handshake of a stranger was a line in a form of its own, in the middle of JSON."""
    code = f"""
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_VERBOSITY"))
sys.meta_path.insert(0, Finder())
import {program}
import grpc
"""
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    told = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert told.stdout == "ERROR\n"
