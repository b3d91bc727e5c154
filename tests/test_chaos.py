"""Chaos in short: real processes, a dozen faults; every stream is the undisturbed one, or ends with a status."""

from __future__ import annotations

from pathlib import Path

from loadtest.chaos import FAULTS, Plan, Resumes, has_failed, run_chaos
from loadtest.chaos_streams import Answer, Received, Streams, Tally

SHORT = Plan(num_faults=12, num_streams=4, num_scripts=6, max_length=150, seconds_between=0.5, seed=5)


async def test_no_fault_costs_a_token(tiny: Path) -> None:
    figures = await run_chaos(SHORT, tiny)
    assert not has_failed(figures), figures
    assert figures["faults"] == 12
    assert len(figures["faults_by_kind"]) >= 11, f"of {len(set(FAULTS))} kinds"
    assert figures["streams_finished"] > 10
    assert figures["tokens"] > 400


def received(*tokens: int, text: str = "abc", is_finished: bool = True) -> Received:
    stream = Received(0.0, list(tokens), text)
    if is_finished:
        stream.finished = object()  # type: ignore[assignment]  # only that it is there
    return stream


def test_lost_and_repeated_tokens_are_seen() -> None:
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


def test_the_time_to_resume_is_from_the_kill_to_the_next_token() -> None:
    streams, resumes = Streams([], [], []), Resumes()
    moved, stayed = Received(1.0, token_times=[2.0, 3.0, 5.5, 6.0]), Received(1.0, token_times=[2.0, 6.0])
    streams.ended = [("moved", moved), ("stayed", stayed)]
    resumes.moved = {"moved": (3.5, 4.0)}
    assert resumes.seconds(streams) == [2.0]
