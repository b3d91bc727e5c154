"""What is refused, in OpenAI's form: the right status, the field by its name, and never a 500."""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.admission.call_limiter import SMALL_BYTES
from orchestrator.http_api.body import MAX_BODY_BYTES
from orchestrator.http_api.fields.base import Fields
from orchestrator.http_api.fields.generation import ChatFields, CompletionFields, MessageFields
from orchestrator.http_api.responses.fields import ResponseFields
from tests.fakes.http_stack import HttpStack, Json, error_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER: Json = {"role": "user", "content": "x"}
BOT: Json = {"role": "assistant", "content": "x"}
TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": {}}}
NAMED: Json = {"type": "function", "function": {"name": "f"}}
CALL: Json = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ODD: Json = {"name": "f", "arguments": "[1]"}
HALF_A_PAIR: Json = {"name": "f", "arguments": '{"a": "\\ud83d"}'}
LIST: Json = {"name": "f", "parameters": {"type": "array"}}
SHORT: Json = {"max_tokens": 1, "speculation": False}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", "x"),
        ("messages", None),
        ("messages[0].role", [{"role": "function", "content": "x"}]),
        ("messages[0].tool_call_id", [{"role": "tool", "content": "x"}]),
        ("messages[0].tool_call_id", [USER | {"tool_call_id": "call_1"}]),
        ("messages[0].tool_calls", [USER | {"tool_calls": [CALL]}]),
        ("messages[0].tool_calls[0].function.arguments", [BOT | {"tool_calls": [CALL | {"function": ODD}]}]),
        ("messages[0].tool_calls[0].function.arguments", [BOT | {"tool_calls": [CALL | {"function": HALF_A_PAIR}]}]),
        ("messages[0].tool_calls", [BOT | {"tool_calls": [CALL] * 129}]),
        ("messages[0].content", [{"role": "user"}]),
        ("messages[0].content", [{"role": "assistant", "content": None}]),
        ("messages[1].content", [USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("messages[0].content", [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]),
        ("messages[0].tool_calls", [USER | {"tool_calls": [{"id": "1"}]}]),
        ("messages[1].tool_calls", [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]),
        ("temperature", "hot"),
        ("temperature", True),
        ("n", 1.5),
        ("max_completion_tokens", 2),
        ("stop", [1]),
        ("stop[0]", [""]),
        ("stop_token_ids", [10**6]),
        ("logit_bias", {"first": 1}),
        ("logit_bias", {"5": 1, "05": 2}),
        ("logit_bias", {"99999": 1}),
        ("top_logprobs", 2),
        ("stream", "yes"),
        ("stream_options.include_usage", {"include_usage": 1}),
        ("speculation.budget", {"budget": 10**6}),
        ("speculation.speed", {"speed": 1}),
        ("session_id", "x" * 10_000),
        ("temprature", 1),
        ("tools[0].function", [{"type": "function"}]),
        ("tools[0].type", [TOOL | {"type": "web_search"}]),
        ("tools[0].function.name", [{"type": "function", "function": {"name": "two words"}}]),
        ("tools[1].function.name", [TOOL, TOOL]),
        ("tools[0].function.parameters", [{"type": "function", "function": LIST}]),
        ("tools[0].function.parametres", [{"type": "function", "function": {"name": "f", "parametres": LIST}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "description": "x" * 132_000}}]),
        ("tools", [TOOL] * 129),
        ("tool_choice", "required"),
        ("tool_choice", "any"),
        ("tool_choice", {"type": "function"}),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [NAMED]}}),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED] * 129}}),
        ("tool_choice", {"type": "function", "name": "f"}),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}),  # no tools
        ("parallel_tool_calls", 1),
        ("functions", [{}]),
        ("response_format", {"type": "structural_tag"}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs.json", {"json": "x" * 132_000}),
        ("guided_json", "x" * 132_000),
        ("guided_choice", []),
        ("regex", ["a"]),
        ("documents", [{"text": "x"}]),
        ("use_search", True),
        ("messages[0].contents", [USER | {"contents": "x"}]),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy"}),
        ("moderation", {"model": "omni"}),
        ("web_search_options", {}),
        ("tools", {}),
        ("tool_choice", {"type": "function", "function": {"name": "x"}}),
        ("min_tokens", 2),
        ("min_tokens", False),
        ("include_stop_str_in_output", 1),
        ("length_penalty", 2),
        ("skip_special_tokens", False),
        ("skip_special_tokens", 1),
        ("continue_final_message", True),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", "{}"),
        ("include_reasoning", 0),
        ("reasoning_effort", ""),
        ("messages[0].reasoning", [BOT | {"reasoning": {}}]),
        ("add_special_tokens", True),
        ("bad_words", ["no"]),
        ("echo", True),
        ("priority", 1),
        ("return_token_ids", True),
        ("request_id", 7),
        ("request_id", "x" * 129),
    ],
)
async def test_an_invalid_field_is_named(endpoint: HttpStack, field: str, value: Any) -> None:
    name = field.partition(".")[0].partition("[")[0]
    for stream in (False, True):
        body = {"messages": [USER], "stream": stream} | SHORT | {name: value}
        status, error = await endpoint.refusal(CHAT, body)
        assert (status, error["type"]) == (400, "invalid_request_error"), error
        assert error["param"].startswith(field), error
        assert error["message"].startswith(f"{error['param']}: ")
        assert "validation" not in error["message"]


async def test_an_unknown_field_that_is_ignored_is_logged_once(
    endpoint: HttpStack, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert (await endpoint.answer(CHAT, {"messages": [USER], "ducoments": []} | SHORT))["choices"]
    assert [record.getMessage() for record in caplog.records if "ducoments" in record.getMessage()] == [
        "requests have an unknown field 'ducoments'; it is ignored, as it has no effect"
    ]
    assert (await endpoint.answer(CHAT, {"messages": [USER], "x" * 10_000: []} | SHORT))["choices"]
    assert len(caplog.records[-1].getMessage()) < 200


async def test_an_output_format_is_requested_once(endpoint: HttpStack) -> None:
    """By whichever server's name; the second of two is refused."""
    json_object = {"type": "json_object"}
    for field, more in (
        ("regex", {"guided_json": {}, "regex": "a"}),
        ("structured_outputs", {"guided_choice": ["a"], "structured_outputs": {"regex": "a"}}),
        ("guided_grammar", {"guided_grammar": "start: A", "response_format": json_object}),
    ):
        status, error = await endpoint.refusal(CHAT, {"messages": [USER]} | SHORT | more)
        assert (status, error["param"]) == (400, field), error
        assert "be left out with" in error["message"]


async def test_null_counts_as_left_out(endpoint: HttpStack) -> None:
    """Also for fields that bough does not know: clients do not misspell what they do not use."""
    message = dict.fromkeys([*MessageFields.model_fields, "tool_call_id"]) | USER
    body = dict.fromkeys([*ChatFields.model_fields, "guided_json"]) | {"messages": [message], "max_tokens": 3}
    assert (await endpoint.answer(CHAT, body))["usage"]["completion_tokens"] <= 3
    assert (await endpoint.answer(COMPLETIONS, dict.fromkeys(CompletionFields.model_fields) | {"prompt": "x"}))[
        "choices"
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tool_choice", "none"),
        ("tool_choice", "auto"),
        ("functions", []),
        ("function_call", "none"),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("n", 1),
        ("user", "somebody"),
        ("store", False),
        ("metadata", {"a": "b"}),
        ("parallel_tool_calls", True),
        ("prompt_cache_options", {"mode": "implicit"}),
        ("service_tier", "auto"),
        ("stream_options", {}),
        ("stop", []),
        ("logit_bias", {}),
        ("top_logprobs", 0),
        ("logprobs", False),
        ("temperature", 1),
        ("top_k", -1),
        ("reasoning_effort", "low"),
        ("min_tokens", 0),
        ("length_penalty", 1.0),
        ("skip_special_tokens", True),
        ("add_generation_prompt", True),
        ("continue_final_message", False),
        ("chat_template_kwargs", {}),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("messages", [{"role": "developer", "content": "Be short."}, USER]),
        ("messages", [USER | {"name": "ann", "tool_calls": []}]),
        ("messages", [USER | {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
        ("messages", [USER, {"role": "assistant", "content": "b", "refusal": None, "annotations": []}, USER]),
        ("messages", [USER, {"role": "assistant", "content": None, "refusal": "No."}, USER]),
        ("messages", [USER, {"role": "assistant", "refusal": "No."}, USER]),
        ("messages", [USER, BOT | {"content": [{"type": "refusal", "refusal": "No."}]}, USER]),
        ("add_special_tokens", False),
        ("bad_words", []),
        ("echo", False),
        ("include_reasoning", True),
        ("include_reasoning", False),
        ("messages", [USER, BOT | {"content": None, "reasoning": "Hm."}, USER]),
        ("priority", 0),
        ("prompt_logprobs", 0),
        ("return_token_ids", False),
        ("return_tokens_as_token_ids", False),
        ("separate_reasoning", True),
        ("documents", []),
        ("use_search", False),
        ("cache_control", {"type": "ephemeral"}),
        ("messages", [USER | {"id": "msg_1", "cache_control": {"type": "ephemeral"}, "createdAt": "2026-11-28"}]),
        ("messages", [USER, BOT | {"provider_specific_fields": {"a": 1}, "thinking_blocks": [{}]}, USER]),
        ("messages", [USER | {"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]),
    ],
)
async def test_default_values_are_accepted(endpoint: HttpStack, field: str, value: Any) -> None:
    assert (await endpoint.answer(CHAT, {"messages": [USER]} | SHORT | {field: value}))["choices"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [1, "x"]),
        ("prompt", [[1], [-1]]),
        ("prompt[0]", [10**6]),
        ("prompt", "x " * 10_000),
        ("n", 65),
        ("echo", True),
        ("best_of", 2),
        ("suffix", "end"),
        ("logprobs", True),
        ("logprobs", 65),
        ("add_special_tokens", False),
        ("session_id", "several"),
    ],
)
async def test_an_invalid_field_of_completions_is_named(endpoint: HttpStack, field: str, value: Any) -> None:
    name = field.partition("[")[0]
    several = {"prompt": ["x", "y"]} if name in ("n", "session_id") else {"prompt": "x y"}
    body = several | SHORT | {name: value} | ({"logprobs": 1} if name == "echo" else {})
    status, error = await endpoint.refusal(COMPLETIONS, body)
    assert (status, error["type"]) == (400, "invalid_request_error"), error
    assert error["param"].startswith(field), error


@pytest.mark.parametrize(
    ("prompt", "echo", "field"),
    [
        ([[1], [2, 10**6]], False, "prompt[1][1]"),
        ([[1], [2, 10**6]], True, "prompt[1][1]"),
        (["x", "x " * 10_000], False, "prompt[1]"),
        (["", "x"], False, "prompt[0]"),
        (["x"], True, ""),
        ([[10**6]], False, "prompt[0]"),
        ([[10**6]], True, "prompt[0]"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_invalid_one_of_several_prompts_is_named(
    endpoint: HttpStack, prompt: Any, echo: bool, field: str, stream: bool
) -> None:
    response = await endpoint.post(COMPLETIONS, {"prompt": prompt, "echo": echo, "n": 2, "stream": stream} | SHORT)
    assert response.status_code == (400 if field else 200), response.text
    if field:
        assert error_of(response)["param"] == field
        assert error_of(response)["message"].startswith(f"{field}: ")


async def test_null_instead_of_a_text_is_named_as_null(endpoint: HttpStack) -> None:
    """Not as missing, which would not help. With a refusal, null content is how OpenAI answers."""
    said: Json = {"role": "assistant", "content": None}
    for message in (said, said | {"refusal": None}, {"role": "user", "content": None, "refusal": "No."}):
        _, error = await endpoint.refusal(CHAT, {"messages": [message]} | SHORT)
        assert error["message"].startswith("messages[0].content: must be a text"), error
    tokens = [
        (await endpoint.answer("/tokenize", {"messages": [USER, message, USER]}))["tokens"]
        for message in (said | {"refusal": "No."}, said | {"content": "No."})
    ]
    assert tokens[0] == tokens[1]


async def test_min_tokens_cannot_be_combined_with_an_output_format(endpoint: HttpStack) -> None:
    body: Json = {"prompt": "x", "max_tokens": 4, "min_tokens": 2, "response_format": {"type": "json_object"}}
    status, error = await endpoint.refusal(COMPLETIONS, body)
    assert (status, error["param"]) == (400, "min_tokens")


async def test_a_byte_order_mark_before_json_is_skipped(endpoint: HttpStack) -> None:
    body = codecs.BOM_UTF8 + json.dumps({"prompt": "x"} | SHORT).encode()
    response = await endpoint.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("body", "is_accepted"),
    [
        ({"prompt": "x", "add_special_tokens": True}, True),
        ({"prompt": "x", "add_special_tokens": False}, False),
        ({"messages": [USER], "add_special_tokens": False, "add_generation_prompt": True}, True),
        ({"messages": [USER], "continue_final_message": False, "chat_template_kwargs": {}, "tools": []}, True),
        ({"messages": [USER], "add_special_tokens": True}, False),
        ({"messages": [USER], "add_generation_prompt": False}, False),
        ({"messages": [USER], "chat_template_kwargs": {"bos_token": "x"}}, False),
        ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, False),
    ],
)
async def test_prompts_are_tokenized_only_as_they_are_read(endpoint: HttpStack, body: Json, is_accepted: bool) -> None:
    response = await endpoint.post("/tokenize", body)
    assert response.status_code == (200 if is_accepted else 400), response.text
    if not is_accepted:
        assert error_of(response)["param"] == list(body)[1]


@pytest.mark.parametrize(("path", "prefix"), [(CHAT, "chatcmpl-"), (COMPLETIONS, "cmpl-")])
async def test_a_requests_own_id_is_its_answers(endpoint: HttpStack, path: str, prefix: str) -> None:
    prompt: Json = {"messages": [USER]} if path == CHAT else {"prompt": "x"}
    for _ in range(2):  # once it has ended, another may have it
        assert (await endpoint.answer(path, prompt | SHORT | {"request_id": "mine"}))["id"] == f"{prefix}mine"
    body = prompt | {"request_id": "mine", "ignore_eos": True, "max_tokens": 2000, "speculation": False}
    async with endpoint.client.stream("POST", path, json=body | {"stream": True}):
        refused = await endpoint.post(path, prompt | SHORT | {"request_id": "mine"})
    assert (refused.status_code, error_of(refused)["param"]) == (409, "request_id")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body: must be a JSON object, got "),
        (b"{", "body: must be a JSON object, got invalid JSON: EOF while parsing an object at line 1 column 1"),
        (b'["x"]', "body: must be a JSON object, got ['x']"),
        (b"null", "body: must be a JSON object, got null"),
        (b'{"messages": NaN}', "messages: "),
        (b"\xff", "body: must be a JSON object, got "),
        (b'{"messages": [{"role": "user", "content": "\\udfff"}]}', "body: must be a JSON object, got "),
        (b"[" * 9999, "body: must be a JSON object, got "),
    ],
)
async def test_a_body_other_than_a_json_object_is_refused(endpoint: HttpStack, body: bytes, message: str) -> None:
    response = await endpoint.client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["message"].startswith(message)


@pytest.mark.parametrize(
    ("num_bytes", "refusal"),
    [(MAX_BODY_BYTES, (413, "body_too_large")), (SMALL_BYTES, (400, "context_length_exceeded"))],
)
async def test_a_body_over_the_limit_is_refused_with_or_without_a_length(
    endpoint: HttpStack, num_bytes: int, refusal: tuple[int, str]
) -> None:
    """Of what may be sent at all, and of what can fit a context."""
    body = json.dumps({"messages": [USER | {"content": "x" * num_bytes}]}).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for begin in range(0, len(body), 2**16):
            yield body[begin : begin + 2**16]

    for content in (body, chunks()):
        response = await endpoint.client.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert (response.status_code, error_of(response)["code"]) == refusal
    assert (await endpoint.answer(COMPLETIONS, {"prompt": "x"} | SHORT))["choices"]


async def test_a_body_without_a_json_content_type_is_refused(endpoint: HttpStack) -> None:
    """A browser sends it for a page of any site, without asking first."""
    response = await endpoint.client.post(CHAT, content=json.dumps({"messages": [USER]} | SHORT))
    assert (response.status_code, error_of(response)["param"]) == (415, "content-type")


async def test_a_compressed_body_is_refused(endpoint: HttpStack) -> None:
    """The error names the encoding, and not invalid JSON."""
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    body = gzip.compress(json.dumps({"messages": [USER]} | SHORT).encode())
    response = await endpoint.client.post(CHAT, content=body, headers=headers)
    assert (response.status_code, error_of(response)["param"]) == (415, "content-encoding")


async def test_unknown_paths_methods_and_models_are_refused(endpoint: HttpStack) -> None:
    for path in ("/v1/embeddings", "/v1/chat/completions/", "/v1/chat/completions/x"):
        response = await endpoint.client.post(path, json={})
        assert (response.status_code, error_of(response)["type"]) == (404, "invalid_request_error")
    response = await endpoint.client.get(CHAT)
    assert response.headers["allow"] == "POST"
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
    asked = {"origin": "https://other.example", "access-control-request-method": "POST"}
    preflight = await endpoint.client.options(CHAT, headers=asked)
    assert preflight.status_code == 405
    assert not any(name.startswith("access-control") for name in preflight.headers)
    for path, body in ((CHAT, {"messages": [USER]}), (COMPLETIONS, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        status, error = await endpoint.refusal(path, body | ({} if path == "/tokenize" else SHORT) | {"model": "gpt-9"})
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    unknown = await endpoint.client.get("/v1/models/gpt-9")
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")
    assert error_of(unknown)["message"].startswith("model: must be one of '")


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/v1/response", "/v1/responses"),
        ("/api/generate", ""),
        ("/v1/embeddings", ""),
    ],
)
async def test_an_unknown_path_is_answered_with_the_most_similar_one(
    endpoint: HttpStack, path: str, nearest: str
) -> None:
    error = error_of(await endpoint.client.post(path, json={}))
    expected = f"the nearest path is {nearest}" if nearest else "the paths are /v1/chat/completions, "
    assert error["message"].startswith(f"POST {path}: not found; {expected}")


async def test_a_session_has_one_name(endpoint: HttpStack) -> None:
    """The header's was passed over in silence."""
    body = {"prompt": "x", "session_id": "a"} | SHORT
    assert (await endpoint.post(COMPLETIONS, body, x_session_id="a")).status_code == 200
    response = await endpoint.post(COMPLETIONS, body, x_session_id="b")
    assert (response.status_code, error_of(response)["param"]) == (400, "session_id")


async def test_a_limit_is_named_by_the_clients_field(endpoint: HttpStack) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        for value in (-1, 0, 2**40):
            status, error = await endpoint.refusal(CHAT, {"messages": [USER], name: value})
            assert (status, error["param"]) == (400, name)
            assert error["message"] == f"{name}: must be 1 to 4294967295, got {value}"
            _, error = await endpoint.refusal(COMPLETIONS, {"prompt": "x", "max_tokens": value})
            assert error["message"].startswith("max_tokens: must be 1 ")


def test_every_field_of_openais_package_is_known() -> None:
    """Some were added there, change nothing, and were refused as if they were misspelt."""
    kinds: dict[str, type[Fields]] = {
        "chat.completion_create_params": ChatFields,
        "completion_create_params": CompletionFields,
        "responses.response_create_params": ResponseFields,
    }
    for name, kind in kinds.items():
        module = pytest.importorskip(f"openai.types.{name}", reason="extra `clients`")
        (sent,) = [getattr(module, each) for each in dir(module) if each.endswith("CreateParamsStreaming")]
        known = kind.model_fields.keys() | kind.ignored | kind.neutral.keys()
        assert {*sent.__required_keys__, *sent.__optional_keys__} <= known


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=12),
        st.sampled_from(["user", "text", "json_object", 0, 1, 2, 2**31, 2**32, 2**63, 2**64]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        "messages", "prompt", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens",
        "temperature", "top_p", "n", "seed", "stop", "logit_bias", "presence_penalty", "frequency_penalty", "top_k",
        "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids", "session_id", "speculation", "user", "logprobs",
        "top_logprobs", "response_format", "structured_outputs", "tools", "echo", "suffix", "best_of", "tokens",
        "unknown",
    ]
)  # fmt: skip
SPECULATIONS = st.fixed_dictionaries(
    {},
    optional={
        "enabled": st.booleans(),
        **{name: st.integers(-1, 2**40) for name in ("budget", "width", "depth", "lookup")},
    },
)
FIELDS = st.dictionaries(NAMES, st.one_of(VALUES, SPECULATIONS), max_size=3)


async def check_answered(endpoint: HttpStack, path: str, content: bytes) -> int:
    """The status of an answer, or of a refusal in OpenAI's form and not by the server's fault; a stream ends as one."""
    response = await endpoint.client.post(path, content=content, headers={"content-type": "application/json"})
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, (content, response.text)
        error_of(response)
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in response.text, (content, response.text)
    return response.status_code


@given(path=st.sampled_from([CHAT, COMPLETIONS, "/tokenize", "/detokenize"]), changes=FIELDS)
async def test_any_body_is_answered_or_refused(endpoint: HttpStack, path: str, changes: dict[str, Any]) -> None:
    whole: dict[str, Json] = {
        CHAT: {"messages": [USER], "max_tokens": 2},
        COMPLETIONS: {"prompt": "x", "max_tokens": 2},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [70]},
    }
    body = whole[path] | changes
    if body.get("n") not in (None, 1) or (isinstance(body.get("max_tokens"), int) and body["max_tokens"] > 4):
        body |= {"max_tokens": 2}  # to end soon
    await check_answered(endpoint, path, json.dumps(body).encode())


@given(path=st.sampled_from([CHAT, COMPLETIONS, "/tokenize", "/detokenize"]), content=st.binary(max_size=60))
async def test_any_bytes_are_answered_or_refused(endpoint: HttpStack, path: str, content: bytes) -> None:
    assert await check_answered(endpoint, path, content) != 200
