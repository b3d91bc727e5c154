"""Calls of tools from a real model over HTTP. Its weights are random, so what it calls is what the grammar demands."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest
from tokenizers import pre_tokenizers

from bough.client import Client
from bough.errors import InvalidRequest
from bough.processes.launch import Cluster
from bough.protocol.generation import ChatPrompt, Function, Message, ToolChoice, Tools
from orchestrator.tools.call_parser import ArgumentsText
from orchestrator.tools.formats import QWEN3_CODER

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
# Short, as each character is a token.
SCHEMA: Json = {
    "type": "object",
    "properties": {"at": {"enum": ["Rom", "Ulm"]}, "n": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["at", "n"],
    "additionalProperties": False,
}
TOOLS: list[Json] = [
    {"type": "function", "function": {"name": "sky", "strict": True, "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
USER: Json = {"role": "user", "content": "Sky?"}
ONE: Json = {
    "messages": [USER],
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "sky"}},
    "parallel_tool_calls": False,
    "seed": 1,
}
ALLOWED = "tool_choice.allowed_tools.tools"
UNKNOWN: Json = {"mode": "required", "tools": [{"type": "function", "function": {"name": n}} for n in ("now", "sun")]}
CHARACTERS = sorted(pre_tokenizers.ByteLevel.alphabet())  # the vocabulary of the model
ARGUMENTS = "messages[1].tool_calls[0].function.arguments"
BLOCK = 32  # tokens of a prompt that another session's keys and values serve for
PLAIN = {"speculation": False}


@pytest.fixture
async def http(tiny_cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with Client(tiny_cluster.address) as client:
        url = (await client.server_info()).http_url
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        yield http


async def answered(http: httpx.AsyncClient, body: Json) -> Json:
    response = await http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def choice_of(http: httpx.AsyncClient, body: Json) -> Json:
    """The only choice, with its answer's usage."""
    answer = await answered(http, body)
    (choice,) = answer["choices"]
    return choice | {"usage": answer["usage"]}


async def streamed(http: httpx.AsyncClient, body: Json) -> tuple[Json, str]:
    """The message that a client puts together, and why it ended."""
    message: Json = {"content": "", "tool_calls": []}
    reason = ""
    async with http.stream("POST", CHAT, json=body | {"stream": True}) as stream:
        async for line in stream.aiter_lines():
            for choice in json.loads(line.removeprefix("data: "))["choices"] if line.startswith("data: {") else []:
                delta, reason = choice["delta"], choice["finish_reason"]
                message["content"] += delta.get("content", "")
                for call in delta.get("tool_calls", []):
                    if "id" in call:
                        assert call["index"] == len(message["tool_calls"])
                        assert call["function"]["arguments"] == ""
                        message["tool_calls"].append({name: call[name] for name in ("id", "type", "function")})
                    else:
                        assert list(call) == ["index", "function"]
                        message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


def require_call(choice: Json) -> Json:
    """Its only call, of the function that it had to be, with arguments of its schema."""
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "sky"
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    return dict(call)


def without_ids(message: Json) -> Json:
    """What of a message does not depend on its answer's id."""
    calls = message.get("tool_calls") or []
    return {"content": message["content"] or "", "calls": [call["function"] for call in calls]}


@pytest.mark.parametrize(
    "sampling", [pytest.param({"temperature": 0}, marks=pytest.mark.long), {"temperature": 1.3, "seed": 5}]
)
async def test_a_named_function_is_called_streamed_or_not_with_trees_or_without(
    http: httpx.AsyncClient, sampling: Json
) -> None:
    whole = await choice_of(http, ONE | sampling)
    require_call(whole)
    plain = await choice_of(http, ONE | sampling | PLAIN)
    assert without_ids(plain["message"]) == without_ids(whole["message"])
    assert plain["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    message, reason = await streamed(http, ONE | sampling)
    assert (without_ids(message), reason) == (without_ids(whole["message"]), "tool_calls")


async def test_calls_and_results_are_the_history_of_the_next_answer(http: httpx.AsyncClient) -> None:
    """The call is rendered as it was generated, so that its keys and values serve again where they are kept."""
    for session in ({}, {"session_id": "tools"}):
        first = await choice_of(http, ONE | session)
        call = require_call(first)
        result = {"role": "tool", "tool_call_id": call["id"], "content": "Sunny."}
        body = ONE | {"messages": [USER, first["message"], result], "tool_choice": "none", "max_tokens": 8} | session
        second = await choice_of(http, body)
        assert second["finish_reason"] in ("stop", "length")
        assert "tool_calls" not in second["message"]
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        used = first["usage"]["prompt_tokens"] + (first["usage"]["completion_tokens"] - 2 if session else -BLOCK)
        assert used <= cached < second["usage"]["prompt_tokens"]
        assert without_ids((await choice_of(http, body | PLAIN))["message"]) == without_ids(second["message"])


async def test_a_response_calls_functions_like_a_chat(http: httpx.AsyncClient) -> None:
    called = require_call(await choice_of(http, ONE))["function"]
    tools = [{"type": "function"} | tool["function"] for tool in TOOLS]
    body: Json = {"input": [USER], "tools": tools, "parallel_tool_calls": False, "seed": 1}
    response = (
        await http.post("/v1/responses", json=body | {"tool_choice": {"type": "function", "name": "sky"}})
    ).json()
    (call,) = response["output"]
    assert {name: call[name] for name in called} == called
    body["input"] += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny."}]
    answer = (await http.post("/v1/responses", json=body | {"tool_choice": "none", "max_output_tokens": 8})).json()
    assert [item["type"] for item in answer["output"]] == ["message"]
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] >= response["usage"]["input_tokens"] - BLOCK
    flat = [tools[0] | {"parameters": {"type": "object", "properties": {"a": {"pattern": "(?=a)"}}}}]
    error = (await http.post("/v1/responses", json=body | {"tools": flat, "tool_choice": "required"})).json()["error"]
    assert error["param"] == "tools[0].parameters", error


async def test_trees_change_nothing_if_the_model_decides(http: httpx.AsyncClient) -> None:
    body = ONE | {"tool_choice": "auto", "max_tokens": 24}
    auto = await choice_of(http, body)
    assert without_ids((await choice_of(http, body | PLAIN))["message"]) == without_ids(auto["message"])
    message, reason = await streamed(http, body)
    assert (without_ids(message), reason) == (without_ids(auto["message"]), auto["finish_reason"])


async def test_with_a_format_the_answer_is_a_call_or_follows_it(http: httpx.AsyncClient) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sky", "schema": SCHEMA}}
    allowed = {"mode": "auto", "tools": [ONE["tool_choice"]]}
    body = ONE | {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}, "response_format": form}
    kinds = set()
    for first, seed in (("<", 1), ("{", 2)):
        likely = {"logit_bias": {CHARACTERS.index(first): 20}, "seed": seed}
        choice = await choice_of(http, body | likely)
        kinds.add(choice["finish_reason"])
        if choice["finish_reason"] == "tool_calls":
            require_call(choice)
        else:
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        assert without_ids((await choice_of(http, body | likely | PLAIN))["message"]) == without_ids(choice["message"])
        message, _ = await streamed(http, body | likely)
        assert without_ids(message) == without_ids(choice["message"])
    assert kinds == {"tool_calls", "stop"}


async def test_trees_do_not_change_arguments_between_tags(http: httpx.AsyncClient) -> None:
    """The model's template has no tags, so their grammar is demanded as such."""
    schema: Json = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}, "required": ["a"]}
    tools = Tools((Function("f", json.dumps(schema)),), ToolChoice.REQUIRED, (), allows_several=False)
    grammar = QWEN3_CODER.grammar({0: tools.functions[0]}, tools, {})
    body: Json = {"messages": [USER], "structured_outputs": {"grammar": grammar}, "seed": 4, "max_tokens": 150}
    text = (await choice_of(http, body))["message"]["content"]
    assert (await choice_of(http, body | PLAIN))["message"]["content"] == text
    pieces = QWEN3_CODER.parser(tools).push(text)
    jsonschema.validate(json.loads("".join(piece.text for piece in pieces if isinstance(piece, ArgumentsText))), schema)


async def test_choices_log_probabilities_and_limits_work_with_calls(http: httpx.AsyncClient) -> None:
    answer = await answered(http, ONE | {"n": 2, "logprobs": True, "tool_choice": "required"})
    ids = set()
    for choice in answer["choices"]:
        (call,) = choice["message"]["tool_calls"]
        ids.add(call["id"])
        text = "".join(entry["token"] for entry in choice["logprobs"]["content"])
        assert call["function"]["arguments"] in text
        assert "<tool_call>" in text
    assert len(ids) == 2
    assert sum(len(c["logprobs"]["content"]) for c in answer["choices"]) == answer["usage"]["completion_tokens"]
    cut = await choice_of(http, ONE | {"max_tokens": 44})
    assert cut["finish_reason"] == "length"
    assert cut["message"]["tool_calls"][0]["function"]["name"] == "sky"
    stopped = await choice_of(http, ONE | {"stop": ["at"]})
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "at")
    assert stopped["message"]["tool_calls"][0]["function"]["arguments"] == '{"'


async def test_invalid_calls_are_named(http: httpx.AsyncClient) -> None:
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"not": {}}}}
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{"}}
    cases: list[tuple[Json, str]] = [
        ({"tool_choice": {"type": "function", "function": {"name": "sun"}}}, "tool_choice.function.name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [*TOOLS, odd], "tool_choice": "required"}, "tools[2].function.parameters"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": UNKNOWN}}, f"{ALLOWED}[1].function.name"),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs.regex"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}, ARGUMENTS),
    ]  # fmt: skip
    for fields, param in cases:
        error = (await http.post(CHAT, json=ONE | fields)).json()["error"]
        assert error["param"] == param, error
        assert error["message"].startswith(f"{param}: must"), error


async def test_tools_are_part_of_a_tokenized_prompt(http: httpx.AsyncClient) -> None:
    body = {"messages": [USER], "tools": TOOLS}
    told = (await http.post("/tokenize", json=body | {"return_token_strs": True})).json()
    usage = (await choice_of(http, ONE | {"max_tokens": 1}))["usage"]
    assert told["count"] == usage["prompt_tokens"]
    assert '"at"' in "".join(told["token_strs"])
    error = (await http.post("/tokenize", json={"prompt": "x", "tools": TOOLS})).json()["error"]
    assert error["param"] == "tools"


async def test_tools_are_only_available_over_http(tiny_cluster: Cluster) -> None:
    prompt = ChatPrompt((Message("user", "Hi"),), Tools((Function("f", "{}"),)))
    async with Client(tiny_cluster.address) as client:
        with pytest.raises(InvalidRequest, match=r"chat\.tools: must be left out"):
            await anext(client.generate(prompt))
