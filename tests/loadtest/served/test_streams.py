"""Summaries of streams over both APIs: readings, and the first figures of the report."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bough.errors import Exhausted, Unavailable
from bough.pb import generation_pb2 as pb
from loadtest.locust.reading import Reading
from loadtest.served.__main__ import has_failed, verdict


def chunk(text: str, num_tokens: int) -> str:
    usage = {"prompt_tokens": 7, "completion_tokens": num_tokens}
    return "data: " + json.dumps({"choices": [{"delta": {"content": text}}], "usage": usage})


def test_a_stream_is_read_the_same_over_both_apis() -> None:
    http, grpc = Reading("http"), Reading("grpc")
    for line in (": keep-alive", "", chunk("", 0), chunk("a b", 2), chunk(" c", 3), "data: [DONE]"):
        http.take_line(line)
    for event in (
        pb.GenerateEvent(started=pb.Started(prompt_tokens=7)),
        pb.GenerateEvent(tokens=pb.Tokens(token_ids=[1, 2], texts=["a", " b"])),
        pb.GenerateEvent(tokens=pb.Tokens(token_ids=[3], texts=[" "])),
        pb.GenerateEvent(finished=pb.Finished(text="c", usage=pb.Usage(prompt_tokens=7))),
    ):
        grpc.take_event(event)
    for reading in (http, grpc):
        sample = reading.sample(users=5)
        assert (reading.text, reading.num_events) == ("a b c", 2)
        assert (sample.num_tokens, sample.users) == (3, 5)
        assert sample.error == ""


def test_a_streams_error_is_in_its_sample() -> None:
    half = Reading("http")
    half.take_line(chunk("a", 1))
    assert half.sample().error == "the stream broke off"
    half.take_line("data: [DONE]")
    assert half.sample().error == ""
    told = Reading("http")
    told.take_line('data: {"error": {"message": "the target is gone"}}')
    assert told.sample().error == "the target is gone"
    silent = Reading("http")
    silent.take_line("data: [DONE]")
    assert silent.sample().error == "no token came"
    with pytest.raises(ValueError, match="Expecting"):
        Reading("http").take_line("data: <html>")


def test_refusals_of_both_apis_are_counted() -> None:
    http, grpc, other = Reading("http"), Reading("grpc"), Reading("grpc")
    http.take_status(429, "full", "3")
    grpc.fail(Exhausted("full", 3.0))
    other.fail(Unavailable("gone"))
    assert [(r.is_refused, r.retry_seconds) for r in (http, grpc, other)] == [(True, 3.0), (True, 3.0), (False, 0.0)]
    assert other.sample().error == "gone"


def test_an_error_after_the_first_token_is_no_refusal_and_one_before_it_is() -> None:
    """A stream over HTTP that waits long has its status before its refusal, which comes as an event."""
    refusal = 'data: {"error": {"message": "no place came free", "code": "rate_limit_exceeded"}}'
    waiting, begun, grpc = Reading("http"), Reading("http"), Reading("grpc")
    waiting.take_line(": keep-alive")
    waiting.take_line(refusal)
    for line in (chunk("a", 1), refusal):
        begun.take_line(line)
    grpc.take_event(pb.GenerateEvent(tokens=pb.Tokens(token_ids=[1], texts=["a"])))
    grpc.fail(Exhausted("no slot", 3.0))
    assert [(r.is_refused, bool(r.error)) for r in (waiting, begun, grpc)] == [
        (True, True),
        (False, True),
        (False, True),
    ]


def test_the_verdict_counts_all_failures() -> None:
    found = verdict(
        {
            "soak": {"failed": 32},
            "restarts": {"failed": 64, "unequal": 1, "failures": ["x"], "exit_statuses": [0]},
        }
    )
    assert (found["failed_requests"], found["unequal_texts"]) == (96, 1)


@pytest.mark.parametrize(
    "part",
    [
        {"soak": {"failed": 1}},
        {"restarts": {"unequal": 1}},
        {"restarts": {"bad_exits": 1}},
        {"soak": {"leaks": ["x"]}},
    ],
)
def test_failures_fail_the_command(part: dict[str, Any]) -> None:
    """Only leaks did."""
    assert not has_failed(verdict({"restarts": {"failed": 0, "unequal": 0}, "soak": {"failed": 0, "leaks": []}}))
    assert has_failed(verdict(part))
