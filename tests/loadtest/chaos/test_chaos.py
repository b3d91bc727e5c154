"""Chaos in short: real processes, a dozen faults; every stream is the undisturbed one, or ends with a status."""

from __future__ import annotations

import json
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from bough.pb import common_pb2, target_pb2
from loadtest.chaos.__main__ import KILLS, Plan, Resumes, has_failed, run_chaos
from loadtest.chaos.streams import Answer, Streams, Tally
from loadtest.common.streams import Stream

pytestmark = pytest.mark.chaos

SHORT = Plan(num_faults=12, num_streams=4, num_scripts=6, max_length=150, seconds_between=0.3, seed=1)


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


def arrived(*moments: float) -> Stream:
    return Stream(1.0, rounds=[(moment, Mock()) for moment in moments])


def test_the_time_to_resume_runs_from_the_kill_to_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def heard(session: str, target: str) -> None:
        request = target_pb2.VerifyRequest(context=common_pb2.Context(session_id=session))
        resumes.heard(target, request.SerializeToString())

    streams, resumes = Streams([], [], []), Resumes()
    for session, target in (("moved", "target-0"), ("stayed", "target-1"), ("gone", "target-0")):
        heard(session, target)
    now[0] = 3.5
    resumes.killed("target-0", ["moved", "stayed"])
    now[0] = 4.0
    heard("moved", "target-1")
    heard("stayed", "target-1")
    streams.ended = [
        ("moved", arrived(2.0, 3.0, 3.9, 5.5, 6.0)),
        ("stayed", arrived(2.0, 6.0)),
        ("gone", arrived(2.0)),
    ]
    assert resumes.seconds(streams) == [2.0]
