"""Grammars are checked off the event loop, in an order that no tenant can delay for others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from bough.errors import InvalidRequest
from bough.protocol.generation import Constraint, GenerateOptions, TextPrompt
from orchestrator.opening import prompt as module
from orchestrator.opening.prompt import OutputForm
from tests.fakes.waiting import until


class Checks:
    """Checks of grammars that last until they are let go; their names are regular expressions."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gates: dict[str, threading.Event] = {}

    def check(self, constraint: Constraint) -> str:
        name = constraint.regex or ""
        self.begun.append(name)
        self.gates.setdefault(name, threading.Event()).wait(60)
        return name

    def end(self, name: str) -> None:
        self.gates.setdefault(name, threading.Event()).set()

    def of(self, tenant: str, name: str) -> asyncio.Task[OutputForm]:
        options = GenerateOptions(constraint=Constraint(regex=name), cache_salt=tenant)
        return asyncio.create_task(module.output_form(TextPrompt("x"), options, Mock(), "auto"))


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Checks]:
    checks = Checks()
    monkeypatch.setattr(module, "grammar_of", checks.check)
    yield checks
    for gate in checks.gates.values():
        gate.set()


async def test_a_tenant_with_slow_checks_leaves_a_thread_to_others(checks: Checks) -> None:
    slow = [checks.of("slow", name) for name in ("s1", "s2", "s3")]
    await until(lambda: checks.begun == ["s1"])
    for name in ("o1", "o2"):
        checks.end(name)
        assert (await checks.of("other", name)).grammar == name
    assert checks.begun == ["s1", "o1", "o2"]
    for name in ("s1", "s2", "s3"):
        checks.end(name)
    assert [(await one).grammar for one in slow] == ["s1", "s2", "s3"]


async def test_callers_that_leave_get_no_further_turns(checks: Checks) -> None:
    """A check cannot be stopped: it keeps its tenant's turn, and those that wait behind it are not begun."""
    first, left, last = (checks.of("slow", name) for name in ("s1", "s2", "s3"))
    await until(lambda: checks.begun == ["s1"])
    for task in (first, left):
        task.cancel()
    await asyncio.wait((first, left))
    assert first.cancelled()
    assert left.cancelled()
    assert checks.begun == ["s1"], "its thread is not free yet"
    checks.end("s1")
    checks.end("s3")
    assert (await last).grammar == "s3"
    assert checks.begun == ["s1", "s3"]


async def test_a_refused_check_ends_its_turn(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "grammar_of", Mock(side_effect=InvalidRequest("constraint", "must be another")))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="must be another"):
            await checks.of("one", "a")
