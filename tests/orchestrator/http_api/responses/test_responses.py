"""/v1/responses over a real server, and its codec alone: the requests of /v1/chat/completions in another form."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from http import HTTPStatus
from typing import Any, get_args

import pytest

from bough.errors import InvalidRequest
from bough.protocol.decision import RoundTimings
from bough.protocol.generation import (
    ChatPrompt,
    Event,
    Finished,
    Function,
    Message,
    SpeculationMetrics,
    Started,
    Tokens,
    ToolCall,
    Tools,
    Usage,
)
from bough.protocol.ids import ScopedId
from bough.protocol.sampling_params import PositionLogprobs, TokenLogprob
from orchestrator.http_api.answers.answer import Head
from orchestrator.http_api.body import parse
from orchestrator.http_api.fields.errors import ApiError, api_error
from orchestrator.http_api.fields.tools import tools_of
from orchestrator.http_api.responses.answer import ResponseAnswer, repeated
from orchestrator.http_api.responses.fields import ResponseFields, conversation, response_limits
from orchestrator.tools.formats import HERMES
from tests.fakes.http_stack import HttpStack, Json, error_of

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
QUESTION = "Why is the sky blue?"
BODY: Json = {"input": QUESTION, "max_output_tokens": 12, "temperature": 0.8, "seed": 3, "ignore_eos": True}
CHAT_BODY: Json = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12} | {
    name: BODY[name] for name in ("temperature", "seed", "ignore_eos")
}
LOGPROBS: Json = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
NAMED: Json = {"type": "function", "name": "f"}
TOOL: Json = {"type": "function", "name": "f", "description": "F.", "parameters": {"type": "object"}, "strict": True}
CALL: Json = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
RETURNED: Json = {"type": "function_call_output", "call_id": "call_1", "output": "x"}
REASONING: Json = {"type": "reasoning", "id": "rs_1", "summary": []}
USER: Json = {"role": "user", "content": "x"}


@cache
def event_types() -> dict[str, Any]:
    """The classes of OpenAI's package for the events of a stream, by the events' types."""
    responses = pytest.importorskip("openai.types.responses", reason="extra `clients`")
    kinds = get_args(get_args(responses.ResponseStreamEvent)[0])
    return {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in kinds}


def require_openai_form(events: list[Json]) -> None:
    """Each event is, strictly, what OpenAI's package expects of its type, and they are numbered."""
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        event_types()[event["type"]].model_validate(event, strict=True)


def text_of(response: Json) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", []))


def kinds_of(events: list[Json]) -> list[str]:
    """Their types, without the repetitions of deltas."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [kind for before, kind in zip(["", *kinds], kinds, strict=False) if kind != before]


async def test_the_text_equals_that_of_a_chat_with_the_same_seed(endpoint: HttpStack) -> None:
    chat = await endpoint.answer(CHAT, CHAT_BODY)
    expected = chat["choices"][0]["message"]["content"]
    for speculation in ({"speculation": False}, {"speculation": {"budget": 8, "width": 2, "depth": 3}}):
        response = await endpoint.answer(PATH, BODY | speculation)
        assert text_of(response) == expected
        events = await endpoint.events(PATH, BODY | speculation)
        assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == expected
        assert text_of(events[-1]["response"]) == expected
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


async def test_a_whole_response_has_the_fields_that_clients_read(endpoint: HttpStack) -> None:
    asked = {"instructions": "Be short.", "metadata": {"a": "b"}, "user": "u", "model": "quick"}
    response = await endpoint.answer(PATH, BODY | asked)
    assert response["id"].startswith("resp_")
    assert (response["object"], response["error"], response["store"]) == ("response", None, False)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert {name: response[name] for name in asked} == asked
    (item,) = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    usage = response["usage"]
    assert (usage["output_tokens"], usage["total_tokens"]) == (12, usage["input_tokens"] + 12)
    assert 0 <= usage["input_tokens_details"]["cached_tokens"] < usage["input_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert response["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    require_openai_form([{"type": "response.incomplete", "sequence_number": 0, "response": response}])


async def test_a_stop_text_completes_a_response(endpoint: HttpStack) -> None:
    words = text_of(await endpoint.answer(PATH, BODY)).split()
    response = await endpoint.answer(PATH, BODY | {"stop": words[3]})
    assert (response["status"], text_of(response).split()) == ("completed", words[:3])
    assert response["completed_at"] >= response["created_at"]
    assert response["output"][0]["status"] == "completed"
    events = await endpoint.events(PATH, BODY | {"stop": words[3]})
    assert events[-1]["type"] == "response.completed"
    require_openai_form(events)


async def test_a_stream_has_the_events_of_its_items_in_order(endpoint: HttpStack) -> None:
    events = await endpoint.events(PATH, BODY | LOGPROBS)
    require_openai_form(events)
    assert kinds_of(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    begun, response = events[0]["response"], events[-1]["response"]
    assert (begun["status"], begun["output"], begun["usage"], begun["model"]) == ("in_progress", [], None, "quick")
    (item,) = response["output"]
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}
    told = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    (part,) = item["content"]
    assert told == part["logprobs"]
    assert len(told) == 12
    assert all(len(entry["top_logprobs"]) == 2 for entry in told)
    assert "".join(entry["token"] for entry in told) == part["text"]
    whole = await endpoint.answer(PATH, BODY | LOGPROBS)
    assert whole["output"][0]["content"] == item["content"]


async def test_a_conversation_gives_the_same_prompt_as_a_chat(endpoint: HttpStack) -> None:
    """For any form of its items."""
    said = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "bc"},
        {"role": "assistant", "content": "d"},
    ]
    expected = await endpoint.answer(CHAT, CHAT_BODY | {"messages": [*said, *CHAT_BODY["messages"]]})
    items: list[Json] = [
        {"role": "user", "content": [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]},
        REASONING,
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "phase": None}
        | {"content": [{"type": "output_text", "text": "d", "annotations": [], "logprobs": []}]},
        {"type": "message", "role": "user", "content": QUESTION},
    ]
    for asked in ({"instructions": "a", "input": items}, {"input": [{"role": "developer", "content": "a"}, *items]}):
        response = await endpoint.answer(PATH, BODY | asked)
        assert text_of(response) == expected["choices"][0]["message"]["content"]
        assert response["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]


async def broken_by(endpoint: HttpStack, end: Any, **asked: Any) -> list[Json]:
    """The events of an endless stream at whose first text `end` is called with its id."""
    events: list[Json] = []
    body = BODY | {"max_output_tokens": 4000, "stream": True} | asked
    async with endpoint.client.stream("POST", PATH, json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if events[-1]["type"] == "response.content_part.added":
                    await asyncio.to_thread(lambda: None)
                    await end(events[0]["response"]["id"])
    require_openai_form(events)
    return events


async def test_an_error_in_a_stream_is_its_last_event(endpoint: HttpStack) -> None:
    async def close(_: str) -> None:
        await endpoint.stack.requests.close_session(ScopedId("closed half-way"))

    last = (await broken_by(endpoint, close, session_id="closed half-way"))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    error = last["response"]["error"]
    assert (error["code"], error["param"], error["type"]) == ("server_error", "session_id", "conflict_error")
    assert last["response"]["output"][0]["status"] == "incomplete"


async def test_an_aborted_request_is_a_cancelled_response(endpoint: HttpStack) -> None:
    async def abort(response_id: str) -> None:
        endpoint.stack.requests.abort(ScopedId(response_id))

    last = (await broken_by(endpoint, abort))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")
    assert last["response"]["incomplete_details"] is None
    assert last["response"]["error"] == {"code": "server_error", "message": "the request was aborted"}
    assert last["response"]["usage"]["output_tokens"] < 4000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", []),
        ("input", 7),
        ("input", None),
        ("input[0]", ["x"]),
        ("input[0].type", [{"type": "web_search_call", "id": "ws_1"}]),
        ("input[0].type", [{"type": "item_reference", "id": "msg_1"}]),
        ("input[0].type", [{"type": 7}]),
        ("input[0].role", [{"role": "tool", "content": "x"}]),
        ("input[1].content", [USER, {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("input[0].content", [{"role": "user", "content": [{"type": ["input_text"], "text": "x"}]}]),
        ("input[0].contents", [USER | {"contents": "x"}]),
        ("input[0].call_id", [CALL | {"call_id": ""}]),
        ("input[0].arguments", [CALL | {"arguments": "[1]"}]),
        ("input[0].output", [RETURNED | {"output": {}}]),
        ("input[128]", [CALL] * 129),
        ("input", [REASONING]),
        ("instructions", ["x"]),
        ("max_tokens", 3),
        ("n", 2),
        ("top_logprobs", 2),
        ("include[0]", ["everything"]),
        ("metadata", {str(number): "x" for number in range(17)}),
        ("metadata.a", {"a": 1}),
        ("user", {"id": 1}),
        ("user", "x" * 513),
        ("text.format.type", {"format": {"type": "grammar"}}),
        ("text.format", {"format": {"type": "json_schema", "name": "x"}}),
        ("text.format.schema", {"format": {"type": "json_schema", "schema": "{"}}),
        ("text.format.schema", {"format": {"type": "json_schema", "schema": {"title": "x" * 132_000}}}),
        ("response_format", {"type": "text"}),
        ("tools[0].type", [{"type": "web_search"}]),
        ("tools[0].name", [{"type": "function"}]),
        ("tools[0].parameters", [TOOL | {"parameters": {"type": "array"}}]),
        ("tools[1].name", [TOOL, TOOL]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "web_search"}),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": []}),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": [NAMED] * 129}),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "function": {}}]}),
        ("previous_response_id", "resp_1"),
        ("conversation", {"id": "conv_1"}),
        ("background", True),
        ("truncation", "auto"),
        ("prompt", {"id": "pmpt_1"}),
        ("reasoning.efort", {"efort": "low"}),
        ("stream_options.include_usage", {"include_usage": True}),
        ("min_tokens", 13),
    ],
)
async def test_an_invalid_field_is_named(endpoint: HttpStack, field: str, value: Any) -> None:
    name = field.partition(".")[0].partition("[")[0]
    for stream in (False, True):
        status, error = await endpoint.refusal(PATH, BODY | {"ignore_eos": None, "stream": stream, name: value})
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", field), error
        assert error["message"].startswith(f"{field}: "), error


@pytest.mark.parametrize(
    "asked",
    [
        {"store": True, "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s", "max_tool_calls": 1},
        {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"]},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}, "stream_options": {"include_obfuscation": False}},
        {"truncation": "disabled", "background": False, "parallel_tool_calls": True, "top_logprobs": 0},
        {"tools": [], "tool_choice": "auto"},
        dict.fromkeys(name for name in ResponseFields.model_fields if name not in BODY),
    ],
)
async def test_default_values_are_accepted(endpoint: HttpStack, asked: Json) -> None:
    response = await endpoint.answer(PATH, BODY | {"max_output_tokens": 1} | asked)
    require_openai_form([{"type": "response.incomplete", "sequence_number": 0, "response": response}])


async def test_simulated_workers_follow_formats_and_call_tools(endpoint: HttpStack) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    asked = {"input": "x", "seed": 3}
    formed = asked | {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}
    whole = await endpoint.answer(PATH, formed)
    assert list(json.loads(text_of(whole))) == ["n"]
    assert text_of((await endpoint.events(PATH, formed))[-1]["response"]) == text_of(whole)
    demanded = asked | {
        "tools": [TOOL | {"parameters": schema}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    (call,) = (await endpoint.answer(PATH, demanded))["output"]
    assert (call["name"], list(json.loads(call["arguments"]))) == ("f", ["n"])
    said = [USER, call, RETURNED | {"call_id": call["call_id"]}]
    assert text_of(await endpoint.answer(PATH, {"input": said, "tools": [TOOL], "max_output_tokens": 9}))


async def test_responses_are_not_kept(endpoint: HttpStack) -> None:
    response_id = (await endpoint.answer(PATH, BODY | {"max_output_tokens": 1}))["id"]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        answer = await endpoint.client.request(method, f"{PATH}/{response_id}{path}")
        error = error_of(answer)
        assert (answer.status_code, error["param"], error["code"]) == (404, "response_id", "not_found")
        assert "send the items of the conversation so far as input" in error["message"]
    refusal = await endpoint.refusal(PATH, BODY | {"model": "gpt-9"})
    assert (refusal[0], refusal[1]["code"]) == (404, "model_not_found")


def asked_for(**fields: Any) -> tuple[ResponseFields, Tools | None]:
    given = parse(ResponseFields, json.dumps({"input": "x"} | fields).encode())
    return given, tools_of(given.tools, "", given.tool_choice, allows_several=given.parallel_tool_calls)


def test_calls_belong_to_the_message_before_them() -> None:
    said = [USER, {"role": "assistant", "content": "Let me see."}, CALL, CALL | {"call_id": "call_2"}, RETURNED, CALL]
    prompt, names = conversation(*asked_for(input=said, instructions="i", tools=[TOOL]))
    one, two = ToolCall("call_1", "f", "{}"), ToolCall("call_2", "f", "{}")
    assert prompt == ChatPrompt(
        (
            Message("system", "i"),
            Message("user", "x"),
            Message("assistant", "Let me see.", (one, two)),
            Message("tool", "x", (), "call_1"),
            Message("assistant", "", (one,)),
        ),
        Tools((Function("f", '{"type": "object"}', "F.", is_strict=True),)),
    )
    for field, known in (
        ("chat.messages[0].content", "instructions"),
        ("chat.messages[2].content", "input[1].content"),
        ("chat.messages[2].tool_calls", "input[1].type"),
        ("chat.messages[3].role", "input[4].type"),
        ("chat.messages[4].content", "input[5].content"),
        ("chat.tools[0].function.parameters", "tools[0].parameters"),
        ("constraint.json_schema", "text.format.schema"),
    ):
        assert names_to(field, names) == known


def test_a_tool_may_be_allowed_twice() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [NAMED, NAMED]}
    _, tools = asked_for(tools=[TOOL], tool_choice=allowed)
    assert tools is not None
    assert tools.allowed == ("f",)


def names_to(field: str, names: dict[str, str]) -> str | None:
    return api_error(InvalidRequest(field, "must be another"), names).param


def tokens(text: str, *logprobs: PositionLogprobs) -> Tokens:
    return Tokens((1,), (False,), (text,), logprobs, 1, 0, RoundTimings())


def ended(reason: str = "stop") -> Finished:
    return Finished(reason, "", "", Usage(5, 7, 2), SpeculationMetrics(3, 10, 4, 2.0, (1, 0, 2), 0), RoundTimings(), ())


def streamed(*events: Event, **fields: Any) -> tuple[list[Json], Json]:
    """The events of a response in a format whose calls are marked, and the whole."""
    given, tools = asked_for(**fields)
    spell = (lambda _: [b"a", b"b"].__getitem__) if response_limits(given).logprobs is not None else None
    answer = ResponseAnswer(Head("resp_1", 1), repeated(given, tools), spell, tools, lambda _: HERMES)
    told = [json.loads(json.dumps(chunk)) for event in events for chunk in answer.chunks(0, event)]
    told += [json.loads(json.dumps(chunk)) for chunk in answer.last_chunks()]
    require_openai_form(told)
    return told, answer.whole()


def test_calls_are_separate_items_between_messages() -> None:
    pieces = ["Well. ", '<tool_call>\n{"name": "f", "arg', 'uments": {"a', '": 1}}\n</tool_call>']
    events, response = streamed(Started("r", 5, 1, "m"), *map(tokens, [*pieces, pieces[1], pieces[2] + pieces[3]]),
                                ended(), tools=[TOOL], tool_choice="auto")  # fmt: skip
    message, first, second = response["output"]
    assert message["content"][0]["text"] == "Well."
    assert [call["arguments"] for call in (first, second)] == ['{"a": 1}'] * 2
    assert [item["status"] for item in response["output"]] == ["completed"] * 3
    assert len({first["call_id"], second["call_id"], first["id"], second["id"]}) == 4
    assert events[-1]["response"]["output"] == response["output"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    text = ["output_text.delta", "output_text.done"]
    assert kinds_of(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", *text, "content_part.done",
        "output_item.done", *call, *call, "completed",
    ]  # fmt: skip
    deltas = [event for event in events if event["type"].endswith("arguments.delta")]
    assert "".join(event["delta"] for event in deltas if event["item_id"] == first["id"]) == '{"a": 1}'
    assert [event["output_index"] for event in deltas] == sorted(event["output_index"] for event in deltas)


def test_a_truncated_call_is_incomplete() -> None:
    _, response = streamed(
        Started("r", 5, 1, "m"), tokens('<tool_call>{"name": "f", "arguments": {"a'), ended("length"), tools=[TOOL]
    )
    (call,) = response["output"]
    assert (call["status"], call["arguments"], response["status"]) == ("incomplete", '{"a', "incomplete")


def test_without_text_there_is_an_empty_message() -> None:
    events, response = streamed(Started("r", 5, 1, "m"), ended())
    assert text_of(response) == ""
    assert len(response["output"]) == 1
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert events[-1]["type"] == "response.completed"


def test_log_probabilities_are_sent_with_their_tokens_text() -> None:
    at = [PositionLogprobs(TokenLogprob(token, -0.5), ()) for token in (0, 1)]
    events, response = streamed(
        Started("r", 5, 1, "m"), tokens("", at[0]), tokens("ab"), tokens("", at[1]), ended(), **LOGPROBS
    )
    told = [entry["token"] for entry in response["output"][0]["content"][0]["logprobs"]]
    assert told == ["a", "b"]
    assert [[entry["token"] for entry in event["logprobs"]] for event in events if "delta" in event] == [["a"]]


@pytest.mark.parametrize("more", [{}, {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}])
def test_the_requests_settings_are_repeated_in_the_response(more: Json) -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    named = more or NAMED
    _, response = streamed(Started("r", 5, 1, "m"), ended(), tools=[TOOL], tool_choice=named, text={"format": form},
                           parallel_tool_calls=False, top_p=0.5, max_output_tokens=9)  # fmt: skip
    assert response["text"]["format"].items() >= form.items()
    assert (response["tools"], response["tool_choice"]) == ([TOOL], named)
    assert (response["parallel_tool_calls"], response["top_p"], response["max_output_tokens"]) == (False, 0.5, 9)


def test_an_error_before_the_start_still_creates_a_response() -> None:
    """As clients put a response together from the event by which it was created."""
    given, tools = asked_for(model="m")
    answer = ResponseAnswer(Head("resp_1", 1), repeated(given, tools), None, tools, lambda _: HERMES)
    error = ApiError(HTTPStatus.TOO_MANY_REQUESTS, "requests: too many", "rate_limit_error")
    events = [*answer.failed(error)]
    require_openai_form(events)
    assert kinds_of(events) == ["created", "in_progress", "failed"]
    assert events[-1]["response"]["error"]["code"] == "rate_limit_exceeded"
