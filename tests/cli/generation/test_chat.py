"""`bough chat` and `bough generate` as a person meets them: at a terminal, and where no server runs."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bough.cli.generation.generate import CollectedAnswer, _command
from bough.cli.main import main
from bough.client import Client
from bough.processes.exit_with_parent import MODULE
from bough.protocol.decision import RoundTimings
from bough.protocol.generation import Finished, GenerateOptions, SpeculationMetrics, Usage
from tests.fakes.simulated import pair_of
from tests.fakes.stack import simulated_stack

CTRL_C, CTRL_D = b"\x03", b"\x04"
PATIENCE_SECONDS = 60


class Terminal:
    """A program that runs in a terminal."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process, self._descriptor, self.text = process, descriptor, ""

    async def until(self, pattern: str) -> str:
        """What the program has printed since the last call, once it matches."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (found := re.search(pattern, self.text, re.DOTALL)):
                self.text += (await asyncio.to_thread(os.read, self._descriptor, 65536)).decode()
        seen, self.text = self.text[: found.end()], self.text[found.end() :]
        return seen

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    async def ended(self) -> int:
        """Its exit status."""
        return await asyncio.to_thread(self.process.wait, PATIENCE_SECONDS)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    """A command of bough in a terminal of its own; it ends with the block."""
    outer, inner = pty.openpty()
    command = ["setsid", "--ctty", sys.executable, *MODULE, "bough.cli.main", *arguments]
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner)
    os.close(inner)
    try:
        yield Terminal(process, outer)
    finally:
        process.kill()
        process.wait()
        os.close(outer)


@pytest.mark.pipeline
async def test_ctrl_c_ends_an_answer_and_the_conversation_continues(tmp_path: Path) -> None:
    async with simulated_stack(tmp_path, pair_of(tmp_path, clock_scale=5)) as stack:
        address = stack.addresses["orchestrator"]
        with terminal("chat", "--address", address, "--max-tokens", "4000", "--ignore-eos") as chat:
            assert "/help lists commands" in await chat.until("> ")
            chat.type(b"/help\n/nothing\n")
            assert "/new begins a new conversation" in await chat.until("Ctrl-C ends an answer.*?> ")
            await chat.until("/nothing is no command; /help lists them.*?> ")
            for question in (b"hello\n", b"and then?\n", b"once more\n"):
                chat.type(question)
                await chat.until(r"\n \w+ ")
                chat.type(CTRL_C)
                await chat.until(r"\n> ")
                chat.type(b"/new\n" if question.startswith(b"and") else b"\n")
                await chat.until("> ")
            async with Client(address) as client:
                loads = await client.loads()
            assert (loads.num_requests_running, loads.num_requests_total) == (0, 3)
            chat.type(CTRL_C)
            await chat.until("/exit or Ctrl-D leaves.*?> ")
            chat.type(b"exit\n")
            assert await chat.ended() == 0


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("exit", "exit"), (" quit ", "exit"), ("/exit", "exit"), ("/quit", "exit"), ("/new", "new"), ("/help", "help"),
        ("/bye", "unknown"), ("/usr/bin", "question"), ("/new words", "question"), ("exit code?", "question"),
        ("  ", ""),
    ],
)  # fmt: skip
def test_a_line_is_a_question_unless_it_is_a_command(line: str, meaning: str) -> None:
    assert _command(line) == meaning


@pytest.mark.parametrize(("reason", "number", "says"), [("length", 8, True), ("stop", 8, False), ("length", 7, False)])
def test_an_answer_cut_off_by_the_limit_is_reported_as_such(reason: str, number: int, says: bool) -> None:
    answer = CollectedAnswer()
    speculation = SpeculationMetrics(0, 0, 0, 0.0, (), 0)
    answer.finished = Finished(reason, "", "", Usage(5, number, 0), speculation, RoundTimings(), ())
    remarks = list(answer.remarks(GenerateOptions(max_tokens=8)))
    assert remarks == (["stopped after 8 tokens: --max-tokens allows no more"] if says else [])


@pytest.mark.parametrize("command", [["generate", "hello"], ["chat"], ["explain"]])
def test_without_a_server_the_error_explains_how_to_start_one(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--address", "127.0.0.1:1"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "error: 127.0.0.1:1 does not answer: nothing listens there; is it running? `bough up` starts everything; "
        "--address or BOUGH_ADDRESS sets its address\n"
    )
