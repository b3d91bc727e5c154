"""A running system tells how many tokens its rounds were expected to have, and how many they had."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bough.cli.inspection.doctor import doctor
from bough.cli.main import argument_parser
from bough.client import Client
from bough.protocol.generation import Finished, GenerateOptions, Speculation, TokenPrompt
from tests.fakes.stack import stack


@pytest.mark.slow
async def test_a_running_system_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What expectations are worth on a random model of one layer is another matter: they are there, and move."""
    always = Speculation(
        budget=8, lookup=0
    )  # trees that size themselves may send no guesses of a draft that costs much
    options = GenerateOptions(max_tokens=40, temperature=0.0, ignore_eos=True, speculation=always)
    async with stack(tmp_path) as running, Client(address := running.addresses["orchestrator"]) as client:
        assert await client.calibrations() == ()
        events = [event async for event in client.generate(TokenPrompt((40, 41, 42)), options)]
        (report,) = await client.calibrations()
        assert await doctor(argument_parser().parse_args(["doctor", "--address", address])) == 0
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert 1 <= report.num_rounds <= finished.speculation.num_rounds  # a draft may be asked only now and then
    assert 1.0 <= report.realised_tokens < 40
    assert 1.0 < report.expected_tokens < 32
    told = r"tokens a round of [0-9.]+ s, where [0-9.]+ tokens and [0-9.]+ s were expected"
    assert re.search(told, capsys.readouterr().out)
