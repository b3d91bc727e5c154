"""Grammars that end the process which reads them, or take too much of it, cost their own request and nothing else."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bough.errors import InvalidRequest
from bough.grammar import grammar_worker
from bough.grammar.allowed_tokens import AllowedTokens, Grammars
from bough.grammar.grammar import LEAST_NUMBER, grammar_of
from bough.grammar.grammar_process import GrammarProcess, Limits, Refused, receive, send
from bough.protocol.generation import ChatPrompt, Constraint, Function, GenerateOptions, Message, ToolChoice, Tools
from bough.tokenization.tokenizer import Tokenizer
from bough.tokenization.vocabulary import TokenizerFiles
from orchestrator.opening.prompt import output_form
from tests.fakes.tool_models import model_of
from tests.fakes.waiting import until

CRASHING = f'{{"const": {-(2**63)}}}'  # by a recursion without end
CRASHING_GRAMMAR = f"start: %json {CRASHING}"
WORD = "start: /[a-z]+/"


def patterns(number: int) -> str:
    """A schema whose time and memory double with each pattern."""
    return json.dumps({"type": "string", "allOf": [{"pattern": f".*{chr(97 + i % 26)}.*"} for i in range(number)]})


def along(grammars: Grammars, grammar: str) -> AllowedTokens:
    allowed = grammars.along(grammar, None)
    assert allowed is not None
    return allowed


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint(json_schema=CRASHING), r"constraint\.json_schema: numbers must be at least -9223372036854775295"),
        (
            Constraint(json_schema=f'{{"enum": ["a", [{LEAST_NUMBER - 1}]]}}'),
            r"constraint\.json_schema: numbers must",
        ),
        (
            Constraint(json_schema='{"type": "integer", "const": -1e308}'),
            r"constraint\.json_schema: numbers must be",
        ),
        (
            Constraint(lark=CRASHING_GRAMMAR),
            r"constraint\.lark: must be one that can be followed: it must be read within 2 s and 256 MiB",
        ),
        (Constraint(json_schema=patterns(40)), r"constraint\.json_schema: allOf must have at most 8 patterns, got 40"),
        (
            Constraint(lark=f"start: %json {patterns(40)}"),
            r"constraint\.lark: must be one that can be followed: it must",
        ),
    ],
)
def test_grammars_that_crash_or_exhaust_their_process_are_refused_by_name(constraint: Constraint, message: str) -> None:
    """It ended the orchestrator, or took its memory."""
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=message):
            grammar_of(constraint)
    assert grammar_of(Constraint(lark=WORD)) == WORD


def test_the_least_allowed_number_is_accepted() -> None:
    assert grammar_of(Constraint(json_schema=f'{{"const": {LEAST_NUMBER}}}'))


@pytest.mark.parametrize("parameters", [CRASHING, patterns(40)])
async def test_invalid_parameters_of_a_function_are_refused_by_its_name(parameters: str) -> None:
    tools = Tools((Function("good", "{}"), Function("bad", parameters)), ToolChoice.REQUIRED)
    prompt, tokenizer = ChatPrompt((Message("user", "x"),), tools), model_of("hermes").tokens
    with pytest.raises(InvalidRequest, match=r"chat\.tools\[1\]\.function\.parameters: "):
        await output_form(prompt, GenerateOptions(), tokenizer, "auto")


def test_memory_has_its_own_limit() -> None:
    process = GrammarProcess(Limits(check_seconds=600.0, memory_bytes=200 * 2**20))
    with pytest.raises(Refused, match="it must be read within 600 s and 200 MiB"):
        process.call("check", fields={"grammar": f"start: %json {patterns(40)}"})
    assert process.call("check", fields={"grammar": WORD})[0] == {"is_last": False}


def test_other_outputs_continue_after_a_lost_process(byte_tokenizer: TokenizerFiles) -> None:
    """Their process is another one then, and learns again what they have said."""
    grammars = Grammars(byte_tokenizer, 270)
    allowed, (a, b) = along(grammars, "start: /[ab]{3}/"), Tokenizer(byte_tokenizer).encode_more("ab")
    allowed.stand_on([a])
    before = allowed.after([b])
    with pytest.raises(InvalidRequest, match="constraint: it must be read within 2 s and 256 MiB, and give"):
        along(grammars, CRASHING_GRAMMAR).after([])
    assert before is not None
    assert np.array_equal(allowed.after([b]), before)
    assert allowed.after([b, a, a]) is None


def test_a_mask_of_an_ambiguous_grammar_is_limited_in_time(byte_tokenizer: TokenizerFiles) -> None:
    """Masks of such a grammar took half a second of the sweeps of everybody."""
    names = [f"r{number}" for number in range(300)]
    rules = [f'{name}: x x "a" | "a"' for name in names]
    grammar = grammar_of(Constraint(lark="\n".join(["start: x", f"x: {' | '.join(names)}", *rules])))
    allowed, letters = along(Grammars(byte_tokenizer, 270), grammar), Tokenizer(byte_tokenizer).encode_more("a" * 20)
    with pytest.raises(InvalidRequest, match="constraint: "):
        [allowed.after(letters[:length]) for length in range(20)]


class Panic(BaseException):
    """As pyo3's PanicException, which is no Exception."""


def test_a_panic_of_native_code_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def panicking(*_: object) -> Any:
        raise Panic("index out\nof bounds")

    monkeypatch.setattr(grammar_worker.Worker, "answer", panicking)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=grammar_worker.serve, args=(theirs, Limits(), None))
        thread.start()
        send(ours, {"operation": "check"})
        assert receive(ours) == ({"refused": "it cannot be read: index out of bounds", "is_last": True}, b"")
        thread.join()


PROGRAM = f"""
import sys
from bough.grammar.grammar import grammar_of
from bough.protocol.generation import Constraint
grammar_of(Constraint(lark={WORD!r}))
print("ready", flush=True)
sys.stdin.read()
"""


async def test_grammar_processes_end_with_their_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        (server,) = children(parent.pid)
        (reader,) = children(server)
        os.kill(parent.pid, signal.SIGKILL)
    await until(lambda: not any(is_running(process) for process in (server, reader)))


def children(process_id: int) -> list[int]:
    tasks = Path(f"/proc/{process_id}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def is_running(process_id: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return False
