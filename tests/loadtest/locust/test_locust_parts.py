"""The parts of the load test that need no locust: samples, questions, the climb, and reading a stream of SSE."""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from loadtest.locust.__main__ import MOST_USERS, main, offered_rate, read_arguments, steps
from loadtest.locust.climb import Climb
from loadtest.locust.plan import Kind, Mix, Plan, Question, holds_conversations, parse_kinds, plan_from_environment
from loadtest.locust.samples import (
    UNFINISHED,
    Arrivals,
    Objective,
    Sample,
    percentile,
    read_samples,
    span_seconds,
    summarise,
    write_sample,
)

TEXTS = ("why is the sky blue", "tell me a story of a fox")


def test_tokens_of_the_first_event_are_no_interval() -> None:
    """Three tokens come at once, four more over two seconds: half a second a token, for any first event."""
    arrivals = Arrivals(began=10.0)
    for now, num_tokens in ((11.0, 3), (11.5, 0), (12.5, 2), (13.0, 2)):
        arrivals.take(now, num_tokens)
    assert arrivals.first_token_seconds == 1.0
    assert arrivals.token_seconds == 0.5
    assert arrivals.longest_gap == 1.5
    assert arrivals.num_tokens == 7


def test_an_answer_of_one_event_has_no_time_per_token() -> None:
    arrivals = Arrivals(began=0.0)
    arrivals.take(1.0, 5)
    assert arrivals.token_seconds == 0.0


def test_percentiles_are_measured_values() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (50, 95, 99, 100)] == [50.0, 95.0, 99.0, 100.0]
    assert percentile([7.0], 1) == 7.0
    assert percentile([], 50) == 0.0


def test_goodput_only_counts_requests_that_finished_in_time() -> None:
    samples = [
        Sample("grpc", 0.0, 2.0, first_token_seconds=0.5, token_seconds=0.1, num_tokens=10),
        Sample("grpc", 0.0, 9.0, first_token_seconds=8.0, token_seconds=0.1, num_tokens=10),
        Sample("grpc", 0.0, 0.1, error="full", is_refused=True),
        Sample("grpc", 0.0, 0.1, error="broken"),
        Sample("grpc", 0.0, 0.1, error=UNFINISHED),
    ]
    figures = summarise(samples, seconds=10.0, objective=Objective(first_token_seconds=1.0))
    assert [figures[name] for name in ("finished", "refused", "failed", "unfinished")] == [2, 1, 1, 1]
    assert figures["tokens_per_second"] == 2.0
    assert figures["goodput_tokens_per_second"] == 1.0
    assert figures["errors"] == ["broken"]
    json.dumps(figures)


def test_a_rate_covers_the_time_in_which_requests_ran() -> None:
    """Locust takes seconds to start and to end; tokens per second over those too would be too few."""
    assert span_seconds([Sample("grpc", 5.0, 2.0), Sample("grpc", 6.0, 4.0)]) == 5.0
    assert span_seconds([]) == 1.0


def test_an_offered_rate_counts_sent_requests() -> None:
    assert offered_rate([Sample("grpc", begin, 9.0) for begin in (1.0, 1.5, 2.0, 2.5, 3.0)]) == 2.0
    assert offered_rate([Sample("grpc", 1.0, 9.0)]) == offered_rate([]) == 0.0


def test_answers_of_one_event_do_not_make_tokens_faster() -> None:
    """Half of such answers made the median time of a token 0."""
    at_once = Sample("grpc", 0.0, 1.0, first_token_seconds=1.0, num_tokens=3)
    slow = Sample("grpc", 0.0, 9.0, first_token_seconds=1.0, token_seconds=0.5, longest_gap_seconds=2.0, num_tokens=17)
    figures = summarise([at_once, at_once, at_once, slow], 10.0, Objective(token_seconds=0.1))
    assert (figures["token_seconds"]["p50"], figures["longest_gap_seconds"]["p50"]) == (0.5, 2.0)
    assert figures["goodput_requests_per_second"] == 0.3


@pytest.mark.parametrize(("share", "holders"), [(0.0, []), (0.25, [3, 7]), (0.5, [1, 3, 5, 7]), (1.0, [*range(8)])])
def test_few_users_have_the_same_share_of_conversations(share: float, holders: list[int]) -> None:
    """With a share of 0.25 the first 25 users held them, which were all of eight."""
    assert [number for number in range(8) if holds_conversations(number, share)] == holders


def test_samples_survive_their_file_except_for_a_truncated_line(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    sample = Sample("http", 1.0, 2.0, num_tokens=3, error='a "quoted" word')
    with path.open("w") as file:
        write_sample(file, sample)
        file.write('{"api": "ht')
    assert read_samples(path) == [sample]
    assert read_samples(tmp_path / "none") == []


def test_equal_seeds_give_equal_questions_of_the_requested_lengths() -> None:
    kinds = parse_kinds("40:16:1,400:8:1")
    one, other = Mix(kinds, TEXTS, seed=3), Mix(kinds, TEXTS, seed=3)
    questions = [one.question() for _ in range(50)]
    assert questions == [other.question() for _ in range(50)]
    assert {question.answer_tokens for question in questions} == {16, 8}
    long = [q for q in questions if q.answer_tokens == 8]
    assert all(len(question.text.split()) == 1 + round(400 / 1.3) for question in long)
    assert len({question.text for question in questions}) == 50


@pytest.mark.parametrize("text", ["", "1:2", "a:2:3", "0:1:1", "1:1:-1", "1:1:inf", "1:1:nan"])
def test_an_invalid_mix_is_refused_with_its_part(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be"):
        parse_kinds(text)


def test_a_plan_is_sent_completely_to_the_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(("grpc", "http"), "a:1", "http://a:2", (Kind(1, 2, 3.0),), 0.5, 2, 1.0, 0.0, 9.0, "x", 7)
    for name, value in plan.to_environment().items():
        monkeypatch.setenv(name, value)
    assert plan_from_environment() == plan


def finished(num: int, seconds: float, users: int) -> list[Sample]:
    return [Sample("grpc", 0.0, 1.0, first_token_seconds=seconds, num_tokens=1, users=users)] * num


def test_users_climb_until_the_first_token_takes_three_times_as_long() -> None:
    climb = Climb(step_users=2, step_seconds=10.0, max_users=100, bend=3.0)
    samples: list[Sample] = []
    assert climb.users_at(0.0, samples) == 2
    samples += finished(5, 1.0, users=2)
    assert climb.users_at(9.0, samples) == 2
    assert climb.users_at(10.0, samples) == 4
    samples += finished(5, 2.0, users=4)
    assert climb.users_at(20.0, samples) == 6
    samples += finished(3, 1.0, users=4)  # began before the step
    assert climb.users_at(30.0, samples) == 6
    samples += finished(5, 3.5, users=6)
    assert climb.users_at(30.0, samples) is None
    assert climb.bent_at == 6
    assert climb.steps == [(2, 1.0), (4, 2.0), (6, 3.5)]


def test_a_refusal_ends_the_climb_and_a_step_without_answers_does_not() -> None:
    climb = Climb(step_users=1, step_seconds=1.0, max_users=100, bend=math.inf)
    climb.users_at(0.0, [])
    assert climb.users_at(5.0, finished(2, 1.0, users=1)) == 1
    assert climb.users_at(6.0, [Sample("grpc", 0.0, 0.1, error="full", is_refused=True)]) is None
    assert climb.bent_at == 1


def test_a_climb_ends_at_its_maximum_of_users() -> None:
    climb = Climb(step_users=3, step_seconds=1.0, max_users=3, bend=9.0)
    climb.users_at(0.0, [])
    assert climb.users_at(1.0, finished(5, 1.0, users=3)) is None
    assert climb.bent_at == 0


def test_a_climb_starts_within_its_maximum_of_users_and_ends_in_time() -> None:
    """It was killed with all that it had measured."""
    climb = Climb(step_users=8, step_seconds=1.0, max_users=3, bend=9.0, most_seconds=60.0)
    assert climb.users_at(0.0, []) == 3
    assert climb.users_at(59.0, finished(1, 1.0, users=3)) == 3
    assert climb.users_at(60.0, finished(1, 1.0, users=3)) is None
    assert climb.bent_at == 0


def test_the_result_of_a_climb_is_reported(tmp_path: Path) -> None:
    plan = Plan(("grpc",), "", "", (), 0.0, 1, 0.0, 0.0, 9.0, str(tmp_path / "samples.jsonl"), 7)
    assert plan.read_bent_at() == 0
    plan.write_bent_at(12)
    assert plan.read_bent_at() == 12
    samples = [
        Sample("grpc", 1.0, 2.0, first_token_seconds=0.5, num_tokens=10, users=2),
        Sample("grpc", 2.0, 3.0, first_token_seconds=0.7, num_tokens=10, users=2),
        Sample("grpc", 5.0, 0.5, error="full", is_refused=True, users=4),
    ]
    assert steps(samples) == [
        {"users": 2, "requests": 2, "first_token_p95": 0.7, "tokens_per_second": 5.0, "refused": 0},
        {"users": 4, "requests": 1, "first_token_p95": 0.0, "tokens_per_second": 0.0, "refused": 1},
    ]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--users", "0"], "--users: must be a whole number, 1 or more, got '0'"),
        (["--rate", "-5"], "--rate: must be a number, 0.0 or more, got '-5'"),
        (["--seconds", "0"], "--seconds: must be a number, 1.0 to 86400.0, got '0'"),
        (["--conversations", "2"], "--conversations: must be a number, 0.0 to 1.0, got '2'"),
        (["--slo-ttft", "0"], "--slo-ttft: must be a number, 0.001 or more, got '0'"),
        (["--slo-tpot", "-1"], "--slo-tpot: must be a number, 0.001 or more, got '-1'"),
        (["--rate", "5", "--step-users", "4"], "--step-users: must be left out with --rate"),
        (["--address", "127.0.0.1:1"], "--http: missing; must be given with --address"),
    ],
)
def test_an_invalid_load_is_refused_by_its_flag(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A negative rate was as many requests as the machine could send; no seconds were a test without end."""
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert f"error: {text}" in capsys.readouterr().err


def test_an_invalid_profile_gives_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--simulate", "rtx9999"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(("finished", "failed", "status"), [(3, 0, 0), (3, 1, 1), (0, 0, 1)])
def test_a_load_with_failed_requests_fails_the_command(
    finished: int, failed: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status was 0 where every request had failed."""
    monkeypatch.setattr(
        "loadtest.locust.__main__.run", AsyncMock(return_value={"finished": finished, "failed": failed})
    )
    assert main([]) == status


def test_users_climb_as_far_as_needed() -> None:
    """To eight without a given maximum: two steps, after which no latency has risen."""
    assert read_arguments(["--step-users", "4"]).users == MOST_USERS
    assert read_arguments([]).users == 8


class KeptAlive(BaseHTTPRequestHandler):
    """Answers with keep-alives for five seconds, and then with a token."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        chunk = {"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": 1}}
        token = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
        with suppress(OSError):
            for piece in [b": keep-alive\n\n"] * 50 + [token]:
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                time.sleep(0.1)
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_requests_have_the_same_time_limit_over_http_and_grpc() -> None:
    """Keep-alives gave it more, and what gRPC counted as failed was an answer over HTTP."""
    apis = pytest.importorskip("loadtest.locust.apis", reason="extra `loadtest`")
    with ThreadingHTTPServer(("127.0.0.1", 0), KeptAlive) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        api = apis.HttpApi(f"http://127.0.0.1:{server.server_port}", 3.0, 0.0)  # of one silence too, on a busy machine
        sample = api.ask(apis.Conversation(), Question("hello", 1), 1)
        api.close()
        server.shutdown()
    assert sample.error == "Timeout: no end within 3 s"
    assert not sample.is_refused


RUN_LOCUST = """
import argparse, asyncio
from loadtest.locust.__main__ import run_locust
from loadtest.locust.plan import Plan
plan = Plan(("grpc",), "", "", (), 0.0, 1, 0.0, 0.0, 9.0, "samples.jsonl", 7)
asyncio.run(run_locust(plan, argparse.Namespace(users=1, seconds=60.0, html="report.html")))
"""


def test_locust_ends_with_the_command_that_started_it(tmp_path: Path) -> None:
    """After a `timeout 60 python -m loadtest.locust` its locust continued to call the orchestrator under test."""
    (tmp_path / "locust.py").write_text("import sys, time; print('begun', file=sys.stderr, flush=True); time.sleep(90)")
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[3])))
    command = [sys.executable, "-c", RUN_LOCUST]
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as outer:
        assert outer.stderr is not None
        assert outer.stderr.readline() == "begun\n"
        outer.terminate()
        is_closed, _, _ = select.select([outer.stderr], [], [], 30.0)  # locust's end closes the last copy of the pipe
        assert is_closed
