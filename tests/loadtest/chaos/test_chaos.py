"""Chaos in short: real processes, a dozen faults; every stream is the undisturbed one, or ends with a status."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from bough.pb import common_pb2, target_pb2
from bough.protocol.decision import RoundTimings
from bough.protocol.generation import GenerateOptions, Tokens
from loadtest.chaos import streams
from loadtest.chaos.__main__ import KILLS, Plan, Resumes, has_failed, run_chaos
from loadtest.chaos.streams import Answer, Script, Streams, Tally, Turn
from loadtest.common.streams import Stream

pytestmark = pytest.mark.chaos

SHORT = Plan(num_faults=12, num_streams=4, num_scripts=6, max_length=150, seconds_between=0.3, seed=158)


@pytest.mark.long
async def test_no_fault_loses_a_token(tiny: Path) -> None:
    figures = await run_chaos(SHORT, tiny)
    assert not has_failed(figures), json.dumps(figures)
    assert figures["faults"] == 12
    assert {"flush", "pause", *(f"kill {kind}" for kind in KILLS)} <= figures["faults_by_kind"].keys()
    assert figures["streams_finished"]


def received(*tokens: int, text: str = "abc", is_finished: bool = True) -> Stream:
    stream = Stream(0.0, list(tokens), text)
    if is_finished:
        stream.finished = object()  # only that it is there
    return stream


def test_lost_and_repeated_tokens_are_detected() -> None:
    """A tally that saw nothing would pass everything."""
    wanted = Answer((1, 2, 3, 4, 5), "abc")
    for stream, lost, repeated, is_equal in (
        (received(1, 2, 3, 4, 5), 0, 0, True),
        (received(1, 2, 4, 5), 1, 0, False),
        (received(1, 2, 3, 3, 4, 5), 0, 1, False),
        (received(1, 2, 9, 4, 5), 1, 1, False),
        (received(1, 2, 3, 4), 1, 0, False),
        (received(1, 2, text="a", is_finished=False), 0, 0, True),
        (received(1, 3, text="a", is_finished=False), 1, 1, False),
        (received(1, 2, 3, 4, 5, text="abcc"), 0, 0, False),
    ):
        tally = Tally()
        assert tally.compare(stream, wanted) == is_equal
        assert (tally.unequal, tally.lost_tokens, tally.repeated_tokens) == (int(not is_equal), lost, repeated)


class Silent:
    """A client whose answers have three rounds, and then neither a token nor an end."""

    async def generate(self, *_: object) -> AsyncIterator[Tokens]:
        for token in range(3):
            yield Tokens((token,), (False,), ("a",), (), 1, 0, RoundTimings(0.0))
        await asyncio.Event().wait()


async def test_a_stream_hangs_if_no_token_follows_however_many_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not because it takes long: between many faults there is little time for tokens."""
    monkeypatch.setattr(streams, "HANG_SECONDS", 0.1)
    turn = Turn((1,), GenerateOptions(session_id="a"))
    running = Streams([], [], [])
    assert not await running._converse(cast(Any, Silent()), "a", Script((turn,), False), [Answer((0, 1, 2, 3), "aaaa")])
    assert (running.tally.hung, running.tally.tokens, running.tally.unequal) == (1, 3, 0)
    rounds = Mock()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(Stream(0.0).take(cast(Any, Silent()), cast(Any, None), turn.options, rounds), 0.1)
    assert rounds.call_count == 3


def arrived(*moments: float) -> Stream:
    return Stream(1.0, rounds=[(moment, Mock()) for moment in moments])


def test_the_time_to_resume_runs_from_the_kill_to_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def heard(session: str, target: str) -> None:
        request = target_pb2.VerifyRequest(context=common_pb2.Context(session_id=session))
        resumes.heard(target, request.SerializeToString())

    running, resumes = Streams([], [], []), Resumes()
    for session, target in (("moved", "target-0"), ("stayed", "target-1"), ("gone", "target-0")):
        heard(session, target)
    now[0] = 3.5
    resumes.killed("target-0", ["moved", "stayed"])
    now[0] = 4.0
    heard("moved", "target-1")
    heard("stayed", "target-1")
    running.ended = [
        ("moved", arrived(2.0, 3.0, 3.9, 5.5, 6.0)),
        ("stayed", arrived(2.0, 6.0)),
        ("gone", arrived(2.0)),
    ]
    assert resumes.seconds(running) == [2.0]
