"""Answers that must be JSON, match a regular expression, or be one of some texts, from real models through both APIs.

That trees change nothing of them is shown in `test_equality.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import pytest

from bough.client import Client
from bough.errors import InvalidRequest
from bough.processes.launch import Cluster
from bough.protocol.generation import (
    ChatPrompt,
    Constraint,
    Finished,
    GenerateOptions,
    Message,
    Prompt,
    Resume,
    TextPrompt,
    Tokens,
)
from tests.fakes.tiers import long_but

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["oak", "elm", None]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "tree", "strict": True, "schema": SCHEMA}}
HELLO = {"messages": [{"role": "user", "content": "Name a tree."}], "max_tokens": 200}
FORMAT_SCHEMA = "response_format.json_schema.schema"
HI = TextPrompt("Hello")
WORD = r"[a-c]{2,4}(-[xyz]+)?\."


@pytest.fixture
async def client(tiny_cluster: Cluster) -> AsyncIterator[Client]:
    async with Client(tiny_cluster.address) as client:
        yield client


@pytest.fixture
async def http(client: Client) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=(await client.server_info()).http_url, timeout=120) as http:
        yield http


HOT = {"temperature": 1.2, "seed": 3}


async def answered(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice | {"text": choice.get("text") or choice.get("message", {}).get("content"), **response.json()}


@pytest.mark.parametrize("sampling", long_but([HOT], [HOT, {"temperature": 0}, {"seed": 4, "top_k": 5}]))
async def test_a_chat_answers_in_json_of_the_schema(http: httpx.AsyncClient, sampling: dict[str, Any]) -> None:
    body = HELLO | sampling | {"response_format": FORMAT}
    whole = await answered(http, CHAT, body)
    assert whole["finish_reason"] == "stop"
    jsonschema.validate(json.loads(whole["text"]), SCHEMA)
    assert whole["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    async with http.stream("POST", CHAT, json=body | {"stream": True}) as stream:
        events = [line.removeprefix("data: ") async for line in stream.aiter_lines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["text"]


async def test_any_json_object_can_be_requested(http: httpx.AsyncClient) -> None:
    for wanted in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        answer = await answered(http, CHAT, HELLO | {"seed": 2, "max_tokens": 60} | wanted)
        assert answer["text"].startswith("{")
        assert answer["finish_reason"] == "length" or isinstance(json.loads(answer["text"]), dict)


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": WORD}, WORD),
        ({"choice": ["yes", "no", "it depends"]}, "yes|no|it depends"),
        ({"grammar": 'start: SUM\nSUM: /[0-9]{1,3}/ ("+" /[0-9]{1,3}/)~2'}, r"\d{1,3}(\+\d{1,3}){2}"),
        ({"grammar": 'root ::= sum\nsum ::= [0-9] ("+" [0-9]){2}\n'}, r"\d(\+\d){2}"),
        ({"json": {"type": "boolean"}}, "true|false"),
        ({"json": '{"const": "a"}'}, '"a"'),
    ],
)
async def test_vllms_field_requests_other_constraints(
    http: httpx.AsyncClient, wanted: dict[str, Any], pattern: str
) -> None:
    for seed in range(3):
        body = {"max_tokens": 400, "seed": seed, "structured_outputs": wanted}
        for path, prompt in ((CHAT, {"messages": HELLO["messages"]}), (COMPLETIONS, {"prompt": "Well, "})):
            answer = await answered(http, path, body | prompt)
            assert re.fullmatch(pattern, answer["text"]), answer["text"]
            assert answer["finish_reason"] == "stop"


async def test_unsupported_constraints_are_named(http: httpx.AsyncClient) -> None:
    json_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}
    cases = [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, FORMAT_SCHEMA),
        ({"response_format": json_schema}, FORMAT_SCHEMA),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        ({"guided_regex": "[a"}, "guided_regex"),
        ({"ebnf": "root ::= missing"}, "ebnf"),
        ({"structured_outputs": {"regexp": "x"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"choice": ["A"]}, "logit_bias": {"33": -1000}} , None),
    ]  # fmt: skip
    for fields, param in cases:
        response = await http.post(CHAT, json=HELLO | fields)
        if param is None:
            assert response.json()["choices"][0]["message"]["content"] == "A", "unlikely is not forbidden"
            continue
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert error["message"].startswith(f"{param}: "), error


async def test_a_grammar_that_would_crash_the_library_is_refused_and_the_server_continues(
    http: httpx.AsyncClient, client: Client
) -> None:
    """llguidance recursed without end over one number, which ended every orchestrator that the client knew."""
    schema = {"const": -(2**63)}
    formed = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    lark = f"start: %json {json.dumps(schema)}"
    for path, body, param in (
        (CHAT, HELLO | {"response_format": formed}, FORMAT_SCHEMA),
        (CHAT, HELLO | {"structured_outputs": {"grammar": lark}}, "structured_outputs.grammar"),
        (COMPLETIONS, {"prompt": "x", "structured_outputs": {"json": schema}}, "structured_outputs.json"),
        ("/v1/responses", asked, "text.format.schema"),
    ):
        response = await http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    for constraint in (Constraint(json_schema=json.dumps(schema)), Constraint(lark=lark)):
        with pytest.raises(InvalidRequest, match=r"constraint\.(json_schema|lark): "):
            await generated(client, GenerateOptions(constraint=constraint))
    assert (await answered(http, CHAT, HELLO | {"structured_outputs": {"choice": ["yes"]}}))["text"] == "yes"


async def generated(client: Client, options: GenerateOptions, prompt: Prompt = HI) -> tuple[str, list[int]]:
    text, tokens = "", list[int]()
    async for event in client.generate(prompt, options):
        if isinstance(event, Tokens):
            tokens += event.token_ids
        text += event.text if isinstance(event, Tokens | Finished) else ""
    return text, tokens


async def test_each_turn_of_a_session_has_its_own_constraint(client: Client) -> None:
    prompt, options = ChatPrompt((Message("user", "Yes?"),)), GenerateOptions(session_id="turns", seed=5)
    for constraint, pattern in (
        (Constraint(regex=WORD), WORD),
        (Constraint(choices=("one", "two")), "one|two"),
        (None, "(?s).*"),
        (Constraint(regex="[0-9]{4}"), "[0-9]{4}"),
    ):
        text, _ = await generated(client, replace(options, constraint=constraint, max_tokens=60), prompt)
        assert re.fullmatch(pattern, text), text
        prompt = ChatPrompt((*prompt.messages, Message("assistant", text), Message("user", "And?")))


async def test_a_resumed_stream_continues_within_its_constraint(client: Client) -> None:
    options = GenerateOptions(seed=9, max_tokens=80, constraint=Constraint(regex=r"([a-f]{3} ){4}!"))
    whole, tokens = await generated(client, options)
    resumed = replace(options, request_id="resumed", resume=Resume(7, tuple(tokens[:7])))
    rest, _ = await generated(client, resumed)
    assert whole[:7] + rest == whole
    wrong = replace(options, request_id="wrong", resume=Resume(2, (70, 71)))
    with pytest.raises(InvalidRequest, match="constraint: must allow the output so far, but its token 0, 70, "):
        await generated(client, wrong)


async def test_a_bias_that_bans_all_allowed_tokens_is_reported(client: Client) -> None:
    options = GenerateOptions(
        constraint=Constraint(regex="A+"), logit_bias={token: float("-inf") for token in range(250)}
    )
    with pytest.raises(InvalidRequest, match="constraint: must allow a token that logit_bias and"):
        await generated(client, options)
    assert (await generated(client, replace(options, logit_bias={}, max_tokens=5)))[0].startswith("A")
