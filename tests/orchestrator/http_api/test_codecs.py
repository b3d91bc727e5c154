"""Fields to requests and events to JSON, without a server."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from bough.errors import DeadlineExceeded, Exhausted, InvalidRequest, NotFound, StaleEpoch, Unavailable
from bough.protocol.decision import RoundTimings
from bough.protocol.generation import (
    ChatPrompt,
    Constraint,
    Finished,
    GenerateOptions,
    Message,
    Speculation,
    SpeculationMetrics,
    Started,
    Tokens,
    Usage,
)
from bough.protocol.sampling_params import PositionLogprobs, TokenLogprob
from orchestrator.http_api.answers.answer import Head, chat_logprobs, completion_logprobs, speculative_decoding
from orchestrator.http_api.body import parse
from orchestrator.http_api.chat import FIELD_NAMES, ChatAnswer, chat_limits, chat_prompt
from orchestrator.http_api.fields.errors import ApiError, api_error
from orchestrator.http_api.fields.generation import ChatFields, StreamOptions
from orchestrator.http_api.fields.options import RequestedOutput, choices, constraint_names, response_constraint
from orchestrator.http_api.responses.fields import ResponseFields
from orchestrator.sessions.session import never_begun
from orchestrator.tools.formats import HERMES

SNOWMAN = "☃".encode()
WORDS = [b" a", b"b", SNOWMAN[:1], SNOWMAN[1:]]


def chat_fields(**fields: Any) -> ChatFields:
    return parse(ChatFields, json.dumps({"messages": [{"role": "user", "content": "x"}]} | fields).encode())


def chat_choices(**fields: Any) -> tuple[RequestedOutput, ...]:
    given = chat_fields(**fields)
    return choices(given, (chat_prompt(given.messages),), chat_limits(given), "id", given.session_id)


def test_every_field_equals_its_grpc_field() -> None:
    (wanted,) = chat_choices(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=7, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.3, logit_bias={"5": -100, "6": 1.5}, max_tokens=9, stop=["a", "b"], stop_token_ids=[4],
        top_n_sigma=2.5, min_tokens=5, include_stop_str_in_output=True, ignore_eos=True, logprobs=True, top_logprobs=2,
        session_id="s", model="m",
        speculation={"enabled": False, "budget": 4, "width": 2, "depth": 3, "lookup": 1},
    )  # fmt: skip
    assert wanted.prompt == ChatPrompt((Message("user", "x"),))
    assert wanted.options == GenerateOptions(
        request_id="id", session_id="s", temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=7,
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3, logit_bias={5: -100.0, 6: 1.5},
        max_tokens=9, min_tokens=5, include_stop=True, stop=("a", "b"), stop_token_ids=frozenset({4}), ignore_eos=True,
        logprobs=2, model="m", top_n_sigma=2.5,
        speculation=Speculation(disabled=True, budget=4, width=2, depth=3, lookup=1),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "constraint"),
    [
        ("guided_json", {"type": "array"}, Constraint(json_schema='{"type": "array"}', after_reasoning=True)),
        ("guided_json", '{"type": "array"}', Constraint(json_schema='{"type": "array"}', after_reasoning=True)),
        ("guided_regex", "a+", Constraint(regex="a+", after_reasoning=True)),
        ("guided_choice", ["a", "b"], Constraint(choices=("a", "b"), after_reasoning=True)),
        ("guided_grammar", "start: A", Constraint(lark="start: A", after_reasoning=True)),
        ("regex", "a+", Constraint(regex="a+", after_reasoning=True)),
        ("ebnf", 'root ::= "a"', Constraint(lark='root ::= "a"', after_reasoning=True)),
    ],
)
def test_names_that_other_servers_use_for_formats_are_accepted(field: str, value: Any, constraint: Constraint) -> None:
    """Clients of SGLang and of older vLLM; errors that come later have the client's name for it."""
    fields = chat_fields(**{field: value, "guided_decoding_backend": "xgrammar"})
    assert response_constraint(fields) == constraint
    assert set(constraint_names(fields).values()) == {field}


def test_missing_fields_have_grpcs_defaults() -> None:
    (wanted,) = chat_choices()
    unlimited = wanted.options.max_tokens
    assert wanted.options == GenerateOptions(request_id="id", max_tokens=unlimited)
    assert unlimited >= 2**30


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("stop", ["x"] * 65, "must be a text or a list of at most 64 texts"),
        ("stop_token_ids", [1] * 1025, "must have at most 1024 items"),
        ("logit_bias", {str(token): 1 for token in range(1025)}, "must have at most 1024 items"),
    ],
)
def test_lists_that_no_target_accepts_are_refused_while_reading(field: str, value: object, problem: str) -> None:
    """Of a list as long as a body may be each entry was gone through while all streams waited."""
    with pytest.raises(ApiError, match=f"^{field}: {problem}, got ") as refused:
        chat_fields(**{field: value})
    assert refused.value.param == field


def positions(*log_probs: float) -> tuple[PositionLogprobs, ...]:
    """Tokens 0, 1, ... with the first one as the alternative."""
    return tuple(
        PositionLogprobs(TokenLogprob(index, value), (TokenLogprob(0, -0.5),)) for index, value in enumerate(log_probs)
    )


def test_log_probabilities_of_a_chat() -> None:
    first, banned, half, _ = chat_logprobs(positions(-0.5, -math.inf, -1, -2), WORDS.__getitem__)
    assert first == {
        "token": " a",
        "logprob": -0.5,
        "bytes": [32, 97],
        "top_logprobs": [{"token": " a", "logprob": -0.5, "bytes": [32, 97]}],
    }
    assert banned["logprob"] == -9999.0
    assert (half["token"], half["bytes"]) == ("\ufffd", [SNOWMAN[0]])


def test_log_probabilities_of_a_completion() -> None:
    told = completion_logprobs(positions(-0.5, -math.inf, -1, -2), (10, 12, 13, 13), WORDS.__getitem__)
    assert told.tokens == [" a", "b", "\ufffd", "\ufffd\ufffd"]
    assert told.token_logprobs == [-0.5, -9999.0, -1, -2]
    likeliest = {" a": -0.5}
    assert told.top_logprobs[:2] == [likeliest, likeliest | {"b": -9999.0}]
    assert told.top_logprobs[2:] == [likeliest | {"\ufffd": -1}, likeliest | {"\ufffd\ufffd": -2}]
    assert told.text_offset == [10, 12, 13, 13]


def ended(text: str = "", reason: str = "stop") -> Finished:
    speculation = SpeculationMetrics(3, 10, 4, 2.0, (1, 0, 2), 0)
    return Finished(reason, "", text, Usage(5, 7, 2), speculation, RoundTimings(), ())


def test_held_back_text_is_sent_before_the_end() -> None:
    answer = ChatAnswer(Head("id", 1), 1, StreamOptions(), None, None, lambda _: HERMES)
    tokens = Tokens((1,), (False,), ("x",), (), 1, 0, RoundTimings())
    for event in (Started("r", 5, 1, "m"), tokens, replace(tokens, texts=("",))):
        last = answer.chunks(0, event)
    assert last == [], "nothing is certain yet, so nothing is said"
    held, end = answer.chunks(0, ended("held", "length"))
    assert held["choices"][0]["delta"] == {"content": "held"}
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "length")
    whole = answer.whole()
    assert whole["choices"][0]["message"]["content"] == "xheld"
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert whole["model"] == "m"


@pytest.mark.parametrize("is_first", [True, False])
def test_a_choice_aborted_before_it_begins_does_not_affect_the_others(is_first: bool) -> None:
    """The model had no name from then on; log-probabilities were lost, or several models an error."""
    answer = ChatAnswer(Head("id", 1), 2, StreamOptions(), {"m": WORDS.__getitem__}.__getitem__, None, lambda _: HERMES)
    begun = [(0, Started("r", 5, 1, "m"))]
    aborted = [(1, event) for event in never_begun(GenerateOptions(request_id="r-1"))]
    for index, event in [*aborted, *begun] if is_first else [*begun, *aborted]:
        answer.chunks(index, event)
    (chunk,) = answer.chunks(0, Tokens((0,), (False,), (" a",), positions(-0.5), 1, 0, RoundTimings()))
    assert (chunk["model"], chunk["choices"][0]["logprobs"]["content"][0]["token"]) == ("m", " a")
    answer.chunks(0, ended())
    assert [choice["finish_reason"] for choice in answer.whole()["choices"]] == ["stop", "abort"]


def test_speculation_is_reported_under_the_names_that_benchmarks_read() -> None:
    one = ended().speculation
    other = replace(one, num_rounds=1, num_draft_tokens=2, num_accepted_tokens=0, acceptance_histogram=(1,))
    assert speculative_decoding([one, other]) == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 4 / 12,
        "acceptance_histogram": [2, 0, 2],
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 12,
        "num_spec_steps": 4,
    }
    nothing = speculative_decoding([SpeculationMetrics(0, 0, 0, 0.0, (), 0)])
    assert (nothing["mean_acceptance_length"], nothing["draft_acceptance_rate"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (InvalidRequest("chat.messages", "empty"), 400, "messages"),
        (InvalidRequest("logprobs", "must be 0 to 64", "99"), 400, "top_logprobs"),
        (InvalidRequest("logit_bias[5]", "9999"), 400, "logit_bias[5]"),
        (InvalidRequest("", "no field at all"), 400, None),
        (NotFound("model", "must be 'y'", "'x'"), 404, "model"),
        (StaleEpoch("session_id: 'x' was closed"), 409, "session_id"),
        (Exhausted("full", 2.5), 429, None),
        (RuntimeError("secret"), 500, None),
        (Unavailable("gone"), 503, None),
        (DeadlineExceeded("late"), 504, None),
    ],
)
def test_errors_have_a_status_and_the_fields_name_over_http(error: Exception, status: int, param: str | None) -> None:
    refused = api_error(error, FIELD_NAMES)
    assert (refused.status, refused.param) == (status, param)
    told = json.loads(refused.response().body)["error"]
    assert told["param"] == param
    assert "secret" not in told["message"]
    if param:
        assert told["message"].startswith(param)
    headers = refused.response().headers
    assert headers.get("retry-after") == {429: "3", 503: "1"}.get(status)
    assert headers.get("retry-after-ms") == {429: "2500", 503: "1000"}.get(status)
    assert headers.get("x-should-retry") == {409: "false"}.get(status)


def test_a_number_too_large_in_a_tools_parameters_is_refused() -> None:
    """A response repeats its tools: it failed when all of it had been generated, a stream had what is no JSON."""
    body = b'{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"maximum": 1e999}}]}'
    with pytest.raises(ApiError, match=r"^tools\[0\]\.parameters: must be a JSON Schema of finite numbers, got "):
        parse(ResponseFields, body)


def test_a_fields_first_error_is_reported() -> None:
    with pytest.raises(ApiError) as refused:
        chat_fields(messages=[{"role": "user", "content": "x"}, {"role": "user"}])
    assert refused.value.message == "messages[1].content: missing; must be given"
