"""`bough top`, with simulated workers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bough.cli.flags.reaching import MISSING
from bough.cli.inspection.top import top
from bough.cli.main import argument_parser
from bough.client import Client
from bough.protocol.generation import GenerateOptions, TextPrompt
from tests.fakes.simulated import pair_of
from tests.fakes.stack import simulated_stack


async def test_top_shows_workers_rates_and_the_last_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with simulated_stack(tmp_path, pair_of(tmp_path)) as stack:
        address = stack.addresses["orchestrator"]
        flags = ["top", "--address", address, "--interval", "0.05"]
        assert await top(argument_parser().parse_args([*flags, "--count", "1"])) == 0
        before = capsys.readouterr().out
        assert "0 running, 0 waiting\n" in before
        assert "why" not in before, "nothing has run yet"
        async with Client(address) as client:
            async for _ in client.generate(TextPrompt("Once upon"), GenerateOptions(max_tokens=12, ignore_eos=True)):
                pass
        assert await top(argument_parser().parse_args([*flags, "--count", "2"])) == 0
    first, second = capsys.readouterr().out.split(address + ":")[1:]
    assert "tokens/s" not in first.splitlines()[0], "there is nothing yet to compare with"
    assert "tokens/s" in second.splitlines()[0]
    for text in (first, second):
        assert text.count("in use") == 2
        (head,) = [line for line in text.splitlines() if line.endswith("why")]
        assert head.partition("=")[2].split() == ["draft", "network", "queue", "sweep", "other", "why"]
        rounds = text.partition(head)[2].split("\n\n")[0].strip().splitlines()
        assert rounds
        for row in rounds:
            of_round, _, parts = row.partition("=")
            _, _, accepted, _, tokens, _, seconds = of_round.split()
            assert int(accepted) == int(tokens) - 1, "the last token of a round is the target's own"
            assert sum(map(float, parts.split()[:5])) == pytest.approx(float(seconds), abs=0.005)
    assert "\x1b" not in first, "a file is no terminal"


async def test_top_reports_that_no_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argument_parser().parse_args(["top", "--address", "127.0.0.1:1", "--count", "3"])
    assert await top(arguments) == 1
    assert capsys.readouterr().out == f"127.0.0.1:1 does not answer: nothing listens there; {MISSING}\n"


@pytest.mark.parametrize(
    ("flag", "value"), [("--interval", "-1"), ("--interval", "0"), ("--interval", "nan"), ("--count", "-1")]
)
def test_invalid_pauses_and_counts_are_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        argument_parser().parse_args(["top", flag, value])
    assert re.match(f"error: {flag}: must be .* or more, got '{value}'", capsys.readouterr().err)
