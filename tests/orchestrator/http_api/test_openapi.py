"""The document at /openapi.json: it is valid, complete, and says what is really accepted and answered."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from copy import deepcopy
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.simulation.tokenizer import simulated_tokenizer
from bough.tokenization.tokenizer import Tokenizer
from orchestrator.http_api import body
from orchestrator.http_api.fields.base import Fields
from orchestrator.http_api.fields.errors import ApiError
from orchestrator.http_api.fields.generation import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from orchestrator.http_api.openapi import BODIES, RANGES, document
from orchestrator.http_api.responses.fields import ResponseFields
from tests.fakes.fuzz import decoding
from tests.fakes.http_stack import HttpStack, Json, http_stack
from tests.fakes.openapi_narrowed import narrow
from tests.fakes.openapi_samples import samples

USER: Json = {"role": "user", "content": "x"}
CHAT: Json = {"messages": [USER], "max_tokens": 2}
TEXT: Json = {"prompt": "x", "max_tokens": 2}
SCORED: Json = CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}
SCORED_RESPONSE: Json = {"input": "x", "max_output_tokens": 2, "include": ["message.output_text.logprobs"]}
TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT: Json = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TOKENIZER = Tokenizer(simulated_tokenizer())
NARROWED = deepcopy(document())
narrow(NARROWED)


@pytest.fixture(scope="module")
async def endpoint(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpStack]:
    async with http_stack(tmp_path_factory.mktemp("openapi")) as running:
        yield running


def check(name: str, value: Any) -> None:
    """Raise ValidationError unless a value is one of a schema of the document."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": document()["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


async def test_the_description_is_public_and_its_references_resolve(endpoint: HttpStack) -> None:
    served = (await endpoint.client.get("/openapi.json")).json()
    assert served == document()
    assert served["openapi"] == "3.1.0"
    for schema in served["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    references = {part.split('"')[0] for part in json.dumps(served).split('"#/components/schemas/')[1:]}
    assert references <= served["components"]["schemas"].keys()
    with pytest.raises(jsonschema.ValidationError):
        check("ChatFields", {"messages": [USER | {"content": 1}]})


async def test_the_description_has_every_path_except_those_for_browsers(endpoint: HttpStack) -> None:
    error = (await endpoint.client.get("/nowhere/near/any")).json()["error"]["message"]
    paths = {path for path in error.partition("the paths are ")[2].split(", ") if not path.startswith("/ui")}
    assert paths - document()["paths"].keys() == {"/", "/v1/responses/{response_id}"}
    assert document()["paths"].keys() <= paths


@pytest.mark.parametrize(
    ("path", "body", "answer", "chunk"),
    [
        ("/v1/chat/completions", CHAT, "ChatCompletion", "ChatCompletionChunk"),
        ("/v1/chat/completions", SCORED, "ChatCompletion", "ChatCompletionChunk"),
        ("/v1/completions", TEXT | {"echo": True, "stop": "a"}, "Completion", "Completion"),
        ("/v1/completions", TEXT | {"logprobs": 2}, "Completion", "Completion"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2}, "Response", "ResponseEvent"),
        ("/v1/responses", SCORED_RESPONSE, "Response", "ResponseEvent"),
    ],
)
async def test_answers_match_the_description_whole_and_streamed(
    endpoint: HttpStack, path: str, body: Json, answer: str, chunk: str
) -> None:
    check(answer, await endpoint.answer(path, body))
    if answer == "Response":
        for event in await endpoint.events(path, body):
            check(chunk, event)
        return
    for options in ({}, {"include_usage": True, "include_rounds": True}, {"continuous_usage_stats": True}):
        for each in await endpoint.chunks(path, body | {"stream_options": options}):
            check(chunk, each)


async def test_other_answers_and_refusals_match_the_description(endpoint: HttpStack) -> None:
    tokenized = await endpoint.answer("/tokenize", {"prompt": "x", "return_token_strs": True})
    check("Tokenized", tokenized)
    check("Detokenized", await endpoint.answer("/detokenize", {"tokens": tokenized["tokens"]}))
    models = (await endpoint.client.get("/v1/models")).json()
    check("Models", models)
    check("Model", (await endpoint.client.get(f"/v1/models/{models['data'][0]['id']}")).json())
    for path in ("/v1/chat/completions", "/nowhere", "/v1/models/x"):
        check("Error", (await endpoint.client.get(path)).json())
    for method in ("/health", "/version"):
        described = document()["paths"][method]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate((await endpoint.client.get(method)).json(), described)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("ChatFields", {}),
        ("ChatFields", {"temperature": None, "documents": [], "stop": "a", "speculation": False, "user": "x"}),
        ("ChatFields", {"stop": ["a"], "speculation": {"budget": 4}, "tools": [TOOL], "tool_choice": "auto"}),
        ("ChatFields", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("ChatFields", {"messages": [USER | {"content": [{"type": "text", "text": "a"}], "id": "1"}]}),
        ("ChatFields", {"messages": [USER, {"role": "assistant", "refusal": "No."}]}),
        ("ChatFields", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}),
        ("ChatFields", {"guided_json": {"type": "array"}, "functions": [], "modalities": ["text"]}),
        ("CompletionFields", {}),
        ("CompletionFields", {"prompt": ["a", "b"], "best_of": 1}),
        ("CompletionFields", {"prompt": [1, 2]}),
        ("CompletionFields", {"prompt": [[1], [2, 3]], "logit_bias": {"5": 1}}),
        ("ResponseFields", {}),
        ("ResponseFields", {"input": [USER, {"type": "reasoning", "content": [], "summary": []}], "tools": [FLAT]}),
        ("ResponseFields", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}, "store": True}),
        ("TokenizeFields", {}),
        ("DetokenizeFields", {}),
        ("DetokenizeFields", {"tokens": [7.0]}),  # which is an integer in JSON Schema
    ],
)
def test_accepted_requests_match_the_description(kind: str, fields: Json) -> None:
    whole: dict[str, Json] = {
        "ChatFields": CHAT,
        "CompletionFields": TEXT,
        "ResponseFields": {"input": "x"},
        "TokenizeFields": {"prompt": "x"},
        "DetokenizeFields": {"tokens": [1]},
    }
    (model,) = (one for one in BODIES if one.__name__ == kind)
    whole_body = whole[kind] | fields
    body.parse(model, json.dumps(whole_body).encode())
    check(kind, whole_body)


@pytest.mark.parametrize("name", sorted(RANGES))
async def test_numbers_outside_their_ranges_are_refused(endpoint: HttpStack, name: str) -> None:
    is_response, is_score = name == "max_output_tokens", name in ("logprobs", "max_tokens")
    path = "/v1/responses" if is_response else "/v1/completions" if is_score else "/v1/chat/completions"
    whole: Json = {"input": "x"} if is_response else {"prompt": "x"} if is_score else {"messages": [USER]}
    whole |= {"logprobs": True} if name == "top_logprobs" else {}
    values = RANGES[name]
    beyond = [
        value for value in (values.get("minimum", 1) - 1, values["maximum"] * 2 + 1) if value != -2 or name != "n"
    ]
    for value in beyond:
        status, error = await endpoint.refusal(path, whole | {name: value})
        assert (status, error["param"]) == (400, name), error
    limit = {} if "max" in name else {"max_output_tokens" if is_response else "max_tokens": 2}
    for value in (values.get("minimum", 0.5), 1):
        if (name, value) != ("max_tokens", 0):  # which only scores of a prompt allow
            await endpoint.answer(path, whole | limit | {name: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"temprature": 1},
        {"documents": ["x"]},
        {"temperature": "hot"},
        {"messages": []},
        {"messages": [{"role": "function", "content": "x"}]},
        {"messages": [USER | {"content": [{"type": "image_url", "image_url": {}}]}]},
        {"audio": {"voice": "alloy"}},
        {"functions": [{}]},
        {"stream_options": {"include_usage": 1}},
        {"tool_choice": "any"},
        {"stop": [1]},
        {"guided_choice": []},
    ],
)
def test_requests_that_the_description_forbids_are_refused(fields: Json) -> None:
    forbidden = CHAT | fields
    with pytest.raises(jsonschema.ValidationError):
        check("ChatFields", forbidden)
    with pytest.raises(ApiError):
        body.parse(BODIES[0], json.dumps(forbidden).encode())


READERS: dict[type[Fields], Callable[[bytes, Tokenizer], object]] = {
    ChatFields: decoding.chat_body,
    CompletionFields: decoding.completion_body,
    ResponseFields: decoding.response_body,
    TokenizeFields: decoding.tokenize_body,
    DetokenizeFields: lambda data, _: body.parse(DetokenizeFields, data),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=20, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(data=st.data())
def test_requests_that_the_description_allows_are_accepted(kind: type[Fields], data: st.DataObject) -> None:
    """Schemathesis asks a running server in the same way: see docs/http-api.md."""
    allowed = data.draw(samples({"$ref": f"#/components/schemas/{kind.__name__}"}, NARROWED["components"]))
    READERS[kind](json.dumps(allowed).encode(), TOKENIZER)


def test_a_grammar_cannot_be_combined_with_ignore_eos() -> None:
    strict: Json = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    for fields in ({"tools": [TOOL]}, {"tools": [strict], "tool_choice": "none"}):
        check("ChatFields", CHAT | {"ignore_eos": True} | fields)
    for fields in ({"tools": [strict]}, {"tools": [TOOL], "tool_choice": "required"}, {"regex": "a"}):
        with pytest.raises(jsonschema.ValidationError):
            check("ChatFields", CHAT | {"ignore_eos": True} | fields)
