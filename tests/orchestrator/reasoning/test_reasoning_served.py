"""A reasoning model over HTTP and gRPC: a random one that mostly says a, b, the end of reasoning, and the end."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, Tokenizer

from bough.client import Client
from bough.errors import InvalidRequest
from bough.protocol.generation import ChatPrompt, Constraint, Finished, GenerateOptions, Message, Resume, Tokens
from orchestrator.http_api.app import http_app
from orchestrator.serving.tenants import Callers
from tests.fakes.stack import Stack, stack
from tests.fakes.torch_imports import import_torch

pytestmark = pytest.mark.slow  # running services are called
Json = dict[str, Any]

CHAT = "/v1/chat/completions"
END, ENDS_REASONING = 261, 257
TEMPLATE = (
    "{% for m in messages %}{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}{{ m.content }}\n"
    "{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% else %}<think>\n{% endif %}"
)  # fmt: skip
HI: Json = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    import_torch()
    from loadtest.common.tiny_model import SMALLEST, save_model

    folder = tmp_path_factory.mktemp("reasoning")
    model = save_model(folder / "model", SMALLEST)
    file = model / "tokenizer.json"
    file.write_text(file.read_text().replace('"<u0>"', '"<think>"').replace('"<u1>"', '"</think>"'))
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    tokenizer.save(str(file))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    async with stack(folder, model=model) as running:
        yield running


@pytest.fixture
async def http(served: Stack) -> AsyncIterator[httpx.AsyncClient]:
    app = http_app(Callers(served.requests), CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as client:
        yield client


A, B = (ord(letter) - ord("!") for letter in "ab")  # as `save_tokenizer` numbers them
LIKELY = dict.fromkeys((A, B, ENDS_REASONING, END), 60.0)


def body(**fields: Any) -> Json:
    return {"messages": [HI], "max_tokens": 24, "logit_bias": {str(t): b for t, b in LIKELY.items()}} | fields


async def answered(http: httpx.AsyncClient, **fields: Any) -> Json:
    """The message of the only choice, with usage, finish reason and log-probabilities."""
    response = await http.post(CHAT, json=body(**fields))
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    (choice,) = answer["choices"]
    told: Json = {"usage": answer["usage"], "reason": choice["finish_reason"], "logprobs": choice["logprobs"]}
    return told | dict(choice["message"])


async def streamed(http: httpx.AsyncClient, **fields: Any) -> Json:
    """The message that a client puts together."""
    response = await http.post(CHAT, json=body(**fields) | {"stream": True})
    message: Json = {}
    for line in response.text.splitlines():
        for choice in json.loads(line.removeprefix("data: "))["choices"] if line.startswith("data: {") else ():
            for name in choice["delta"].keys() & {"content", "reasoning"}:
                message[name] = message.get(name, "") + choice["delta"][name]
    return message


async def test_reasoning_is_separated_in_answers_and_streams_and_trees_change_nothing(http: httpx.AsyncClient) -> None:
    kinds = set()
    for seed in range(8):
        whole = await answered(http, seed=seed, logprobs=True)
        tokens = "".join(entry["token"] for entry in whole["logprobs"]["content"]).removesuffix("</s>")
        reasoning, mark, content = tokens.partition("</think>")
        assert (whole["reasoning"], whole["content"]) == (reasoning or None, content or (None if reasoning else ""))
        assert whole["reasoning_content"] == whole["reasoning"]
        details = whole["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": len(reasoning) + (1 if mark else whole["reason"] == "stop")}
        said = {"reasoning": reasoning, "content": content}
        assert {"reasoning": "", **await streamed(http, seed=seed)} == said
        plain = await answered(http, seed=seed, speculation=False)
        assert (plain["reasoning"], plain["content"]) == (whole["reasoning"], whole["content"])
        kinds.add((bool(reasoning), bool(content)))
    assert (True, True) in kinds
    left_out = await answered(http, seed=1, include_reasoning=False)
    assert left_out.keys() & {"reasoning", "reasoning_content"} == set()
    assert left_out["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 4}, {"seed": 5, "temperature": 1.5}])
async def test_a_constraint_starts_after_the_reasoning_in_answers_and_streams_with_and_without_trees(
    http: httpx.AsyncClient, served: Stack, sampling: Json
) -> None:
    forms: list[Json] = [
        {"structured_outputs": {"regex": "[ab]{2}c"}},
        {"structured_outputs": {"choice": ["abba", "baab"]}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["ab", "ba"]}}}},
    ]
    for wanted in forms:
        whole = await answered(http, **sampling, **wanted)
        assert whole["reason"] == "stop"
        assert re.fullmatch('[ab]{2}c|abba|baab|"ab"|"ba"', whole["content"]), whole
        assert (await streamed(http, **sampling, **wanted))["content"] == whole["content"]
        plain = await answered(http, **sampling, **wanted, speculation=False)
        assert (plain["reasoning"], plain["content"]) == (whole["reasoning"], whole["content"])
        closed = await answered(http, **sampling, **wanted, chat_template_kwargs={"enable_thinking": False})
        assert closed["reasoning"] is None
        assert re.fullmatch('[ab]{2}c|abba|baab|"ab"|"ba"', closed["content"]), closed


async def test_over_grpc_a_text_includes_its_reasoning_and_a_constraint_applies_to_all_of_it_by_default(
    served: Stack,
) -> None:
    prompt = ChatPrompt((Message("user", "Hi"),))
    options = GenerateOptions(max_tokens=24, logit_bias=LIKELY, seed=3, constraint=Constraint(regex="[ab]{4}c"))
    after = replace(options, constraint=Constraint(regex="[ab]{4}c", after_reasoning=True))
    async with Client(served.addresses["orchestrator"]) as client:
        whole, tokens = await generated(client, prompt, options)
        assert re.fullmatch("[ab]{4}c", whole)
        text, tokens = await generated(client, prompt, after)
        assert re.fullmatch("[ab]*</think>\n{0,2}[ab]{4}c", text)
        resumed = replace(after, request_id="r", resume=Resume(2, tuple(tokens[:2])))
        assert text.endswith((await generated(client, prompt, resumed))[0])
        closed = replace(prompt, chat_template_kwargs='{"enable_thinking": false}')
        assert re.fullmatch("[ab]{4}c", (await generated(client, closed, after))[0])
        with pytest.raises(InvalidRequest, match=r"^chat\.chat_template_kwargs: must have names .* got 'messages'"):
            await generated(client, replace(prompt, chat_template_kwargs='{"messages": []}'), options)


async def generated(client: Client, prompt: ChatPrompt, options: GenerateOptions) -> tuple[str, list[int]]:
    text, tokens = "", list[int]()
    async for event in client.generate(prompt, options):
        tokens += event.token_ids if isinstance(event, Tokens) else ()
        text += event.text if isinstance(event, Tokens | Finished) else ""
    return text, tokens


async def test_prompts_are_tokenized_with_template_variables_and_reasoning(http: httpx.AsyncClient) -> None:
    said = [HI, {"role": "assistant", "content": None, "reasoning": "ab"}, HI]
    off = {"enable_thinking": False}
    cases: list[tuple[Json, str]] = [
        ({}, "Hi\n<think>\n"), ({"chat_template_kwargs": off}, "Hi\n<think></think>"),
        ({"messages": said}, "Hi\n<ab>\nHi\n<think>\n"),
        ({"messages": said, "chat_template_kwargs": off}, "Hi\n<ab>\nHi\n<think></think>"),
        ({"messages": [HI, {"role": "assistant", "content": "4", "reasoning_content": "ab"}]}, "Hi\n<ab>4\n<think>\n"),
    ]  # fmt: skip
    for fields, text in cases:
        told = (await http.post("/tokenize", json={"messages": [HI], "return_token_strs": True} | fields)).json()
        assert "".join(told["token_strs"]) == text
        usage = (await answered(http, **fields))["usage"]
        assert usage["prompt_tokens"] == told["count"]
    effort = await answered(http, reasoning_effort="none")
    assert (
        effort["usage"]["prompt_tokens"] == (await answered(http, chat_template_kwargs=off))["usage"]["prompt_tokens"]
    )
    both = await answered(http, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert both["usage"]["prompt_tokens"] == (await answered(http))["usage"]["prompt_tokens"]
