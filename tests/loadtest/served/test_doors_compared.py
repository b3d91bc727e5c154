"""What is made of streams that came through several doors: readings, ratios by pairs, figures that stand first."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bough.errors import Exhausted, Unavailable
from bough.pb import generation_pb2 as pb
from loadtest.locust.reading import Reading
from loadtest.locust.samples import Sample
from loadtest.served.doors import Comparison, compare_doors, door_figures
from loadtest.served.streams import Answered, Ask, Door
from loadtest.served.verdict import has_failed, verdict


def chunk(text: str, num_tokens: int) -> str:
    usage = {"prompt_tokens": 7, "completion_tokens": num_tokens}
    return "data: " + json.dumps({"choices": [{"delta": {"content": text}}], "usage": usage})


def test_a_stream_is_read_alike_through_both_doors() -> None:
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


def test_what_goes_wrong_with_a_stream_is_in_its_sample() -> None:
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


def test_refusals_of_both_doors_are_counted_as_such() -> None:
    http, grpc, other = Reading("http"), Reading("grpc"), Reading("grpc")
    http.take_status(429, "full", "3")
    grpc.fail(Exhausted("full", 3.0))
    other.fail(Unavailable("gone"))
    assert [(r.is_refused, r.retry_seconds) for r in (http, grpc, other)] == [(True, 3.0), (True, 3.0), (False, 0.0)]
    assert other.sample().error == "gone"


def test_what_ends_an_answer_that_has_begun_is_no_refusal_and_what_ends_a_wait_is_one() -> None:
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


def answered(first: float, seconds: float, text: str = "x", error: str = "") -> Answered:
    sample = Sample("door", 0.0, seconds, first, (seconds - first) / 4, num_tokens=5, error=error)
    return Answered(sample, text, num_events=3)


async def test_every_request_goes_through_every_door_and_one_that_fails_is_in_no_pair() -> None:
    asked: list[tuple[str, int]] = []

    def door(name: str, failing: int) -> Door:
        async def ask(one: Ask) -> Answered:
            asked.append((name, one.seed))
            text = f"{name if one.seed == 4 else 'same'}"
            return answered(1.0, 2.0, text, error="broken" if one.seed == failing else "")

        return ask

    doors = {"grpc": door("grpc", -1), "http": door("http", 2), "proxy": door("proxy", -1)}
    found = await compare_doors(doors, [Ask("q", 5, seed=seed) for seed in range(6)], seed=1)
    orders = {tuple(name for name, seed in asked if seed == number)[1:] for number in range(6)}
    assert len(orders) > 1, "the order is drawn anew"
    assert all(sorted(order) == ["grpc", "http", "proxy"] for order in orders)
    assert {name: len(each) for name, each in found.answers.items()} == {"grpc": 5, "http": 5, "proxy": 5}
    assert (found.failures, found.num_unequal) == (["http: broken"], 1)


def test_figures_of_doors_are_of_pairs_and_have_intervals() -> None:
    direct = [answered(1.0, 3.0), answered(2.0, 6.0), answered(4.0, 12.0)]
    slower = [answered(1.1, 3.1), answered(2.2, 6.2), answered(4.4, 12.4)]
    figures = door_figures(Comparison({"grpc": direct, "proxy": slower}), seed=1)
    assert figures["proxy"]["ttft_ratio"] == {"geomean": 1.1, "interval": [1.1, 1.1], "worst": 1.1, "best": 1.1}
    assert figures["proxy"]["tpot_ratio"]["geomean"] == 1.0
    assert figures["proxy"]["added_ttft_ms"]["median"] == pytest.approx(200)
    assert figures["proxy"]["added_chunk_ms"]["median"] == pytest.approx(0, abs=1e-6)
    assert (figures["requests"], figures["failed"]) == (3, 0)


def test_figures_where_every_request_failed() -> None:
    figures = door_figures(Comparison({"grpc": [], "http": []}, ["http: broken"] * 3), seed=1)
    assert (figures["requests"], figures["failed"], figures["failures"]) == (0, 3, ["http: broken"])
    assert verdict({"doors": figures}, 1)["failed_requests"] == 3


def test_the_verdict_is_of_the_demonstration_where_that_was_run_and_counts_all_failures() -> None:
    ratio = {"geomean": 1.01, "interval": [1.0, 1.02], "worst": 1.1, "best": 0.9}
    doors = {"failed": 1, "unequal": 2, "http": {"ttft_ratio": ratio, "tpot_ratio": ratio}}
    parts = {
        "doors": doors,
        "demonstration": {**doors, "proxy": {"ttft_ratio": {**ratio, "geomean": 1.03}, "tpot_ratio": None}},
        "carrying": {"one": [{"failed": 4}, {"failed": 8}], "two": [{"failed": 16}]},
        "overload": {"goodput_ratio": 0.97, "failed": 32, "refused": 1000},
        "restarts": {"failed": 64, "unequal": 1, "failures": ["x"], "exit_statuses": [0]},
    }
    told = verdict(parts, clients=16)
    assert told["ttft_ratio"]["of"] == "demonstration"
    assert (told["ttft_ratio"]["http"]["geomean"], told["ttft_ratio"]["proxy"]["geomean"]) == (1.01, 1.03)
    assert "proxy" not in told["tpot_ratio"]
    assert told["overload_goodput_ratio"] == 0.97
    assert (told["failed_requests"], told["unequal_texts"], told["clients"]) == (126, 5, 16)
    assert verdict({"doors": doors}, 1)["ttft_ratio"]["of"] == "doors"
    assert verdict({"soak": {"failed": 0}}, 1)["ttft_ratio"] is None


@pytest.mark.parametrize(
    "part",
    [
        {"doors": {"failed": 1}},
        {"restarts": {"unequal": 1}},
        {"restarts": {"bad_exits": 1}},
        {"soak": {"leaks": ["x"]}},
    ],
)
def test_what_must_not_happen_fails_the_command(part: dict[str, Any]) -> None:
    """Only leaks did."""
    assert not has_failed(verdict({"doors": {"failed": 0, "unequal": 0}, "soak": {"failed": 0, "leaks": []}}, 1))
    assert has_failed(verdict(part, 1))
