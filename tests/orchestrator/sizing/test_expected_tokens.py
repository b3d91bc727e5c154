"""A running system tells how many tokens its rounds were expected to have, and how many they had."""

from __future__ import annotations

import re

import pytest

from bough.cli.inspection.doctor import doctor
from bough.cli.main import argument_parser
from bough.client import Client
from bough.processes.launch import Cluster
from bough.protocol.generation import Finished, GenerateOptions, Speculation, TokenPrompt


async def test_a_running_system_tells(tiny_cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """What expectations are worth on a random model of four layers is another matter: they are there, and move."""
    options = GenerateOptions(max_tokens=40, temperature=0.0, ignore_eos=True, speculation=Speculation(lookup=0))
    async with Client(tiny_cluster.address) as client:
        before = {one.draft_id: one.num_rounds for one in await client.calibrations()}
        events = [event async for event in client.generate(TokenPrompt((40, 41, 42)), options)]
        (report,) = await client.calibrations()
    finished = events[-1]
    assert isinstance(finished, Finished)
    # A draft that is seldom right is asked only now and then.
    num_rounds = report.num_rounds - before.get(report.draft_id, 0)
    assert 1 <= num_rounds <= finished.speculation.num_rounds
    assert 1.0 <= report.realised_tokens < 40
    assert 1.0 < report.expected_tokens < 32
    assert await doctor(argument_parser().parse_args(["doctor", "--address", tiny_cluster.address])) == 0
    told = r"tokens a round of [0-9.]+ s, where [0-9.]+ tokens and [0-9.]+ s were expected"
    assert re.search(told, capsys.readouterr().out)
