"""Log-probabilities of a prompt's tokens: those that generating the same text reports, bit for bit, over both APIs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from bough.client import Client
from bough.errors import InvalidRequest
from bough.processes.launch import Cluster
from bough.protocol.generation import (
    Finished,
    GenerateOptions,
    PromptLogprobs,
    Speculation,
    TokenPrompt,
    Tokens,
)
from bough.protocol.sampling_params import PositionLogprobs

PATH = "/v1/completions"
PROMPT = (72, 101, 108, 108, 111)
GREEDY = GenerateOptions(temperature=0.0, max_tokens=40, logprobs=2, ignore_eos=True)
PLAIN = replace(GREEDY, speculation=Speculation(disabled=True))


@pytest.fixture
async def client(tiny_cluster: Cluster) -> AsyncIterator[Client]:
    async with Client(tiny_cluster.address) as client:
        yield client


class Answered(NamedTuple):
    """The events of a request, joined."""

    prompt: list[int]
    prompt_logprobs: list[PositionLogprobs]
    tokens: list[int]
    logprobs: list[PositionLogprobs]
    finished: Finished


async def answered(client: Client, prompt: tuple[int, ...], options: GenerateOptions) -> Answered:
    told = Answered([], [], [], [], Finished("", "", "", None, None, None, ()))
    async for event in client.generate(TokenPrompt(prompt), options):
        match event:
            case PromptLogprobs():
                told.prompt.extend(event.token_ids)
                told.prompt_logprobs.extend(event.logprobs)
            case Tokens():
                told.tokens.extend(event.token_ids)
                told.logprobs.extend(event.logprobs)
            case Finished():
                told = told._replace(finished=event)
    return told


async def test_a_generated_text_as_a_prompt_has_the_same_log_probabilities(client: Client, tiny: Path) -> None:
    """The prompt is longer than a tree, and was held by the target before: neither makes a difference."""
    generated = await answered(client, PROMPT, PLAIN)
    text = (*PROMPT, *generated.tokens)
    following = (await answered(client, text, replace(PLAIN, max_tokens=3))).tokens
    for options in (GREEDY, replace(GREEDY, session_id="scored"), replace(PLAIN, session_id="scored")):
        scored = await answered(client, text, replace(options, max_tokens=3, prompt_logprobs=2))
        assert scored.prompt == [*text]
        assert len(scored.prompt_logprobs) == len(text) - 1
        assert scored.prompt_logprobs[len(PROMPT) - 1 :] == generated.logprobs
        assert scored.tokens == following
        assert scored.finished.usage.cached_tokens == 0, "all of it was computed"
    none = await answered(client, text, replace(PLAIN, max_tokens=0, prompt_logprobs=2))
    assert none.prompt_logprobs == scored.prompt_logprobs
    assert (none.tokens, none.finished.finish_reason, none.finished.usage.completion_tokens) == ([], "length", 0)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.inference_mode():
        rows = model(torch.tensor([text])).logits[0].log_softmax(-1)
    expected = [float(rows[i, token]) for i, token in enumerate(text[1:])]
    assert [each.token.logprob for each in none.prompt_logprobs] == pytest.approx(expected, abs=1e-3)
    assert [each.token.token_id for each in none.prompt_logprobs] == [*text[1:]]


async def test_prompts_that_cannot_be_scored_are_named(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="prompt_logprobs: must be 0 to 64, got 65"):
        await answered(client, PROMPT, replace(PLAIN, prompt_logprobs=65))
    with pytest.raises(InvalidRequest, match="max_tokens: must be 1 to"):
        await answered(client, PROMPT, replace(PLAIN, max_tokens=0))
    one = await answered(client, PROMPT[:1], replace(PLAIN, max_tokens=0, prompt_logprobs=0))
    assert (one.prompt, one.prompt_logprobs, one.finished.finish_reason) == ([*PROMPT[:1]], [], "length")


async def test_echo_returns_prompt_log_probabilities_for_evaluation_harnesses(client: Client) -> None:
    """As lm-eval's `loglikelihood` reads an answer: the continuation's entries, without the one token generated."""
    body: dict[str, Any] = {"prompt": ["Hello", "Hel"], "echo": True, "logprobs": 1, "temperature": 0, "seed": 1}
    async with httpx.AsyncClient(base_url=(await client.server_info()).http_url, timeout=60) as http:

        async def choices(fields: dict[str, Any]) -> list[Any]:
            response = await http.post(PATH, json=body | fields)
            assert response.status_code == 200, response.text
            return list(response.json()["choices"])

        long, short = await choices({"max_tokens": 1})
        logprobs = long["logprobs"]
        assert long["text"].startswith("Hello")
        assert logprobs["tokens"][:5] == list("Hello")
        assert [len(logprobs[name]) for name in logprobs] == [6] * 4
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]
        assert short["logprobs"]["token_logprobs"][1:3] == logprobs["token_logprobs"][1:3]
        (only, _) = await choices({"max_tokens": 0})
        assert (only["text"], only["finish_reason"]) == ("Hello", "length")
        assert only["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:5]
        for max_tokens in (1, 0):  # a prompt is scored once for all of its choices
            several = await choices({"prompt": "Hello", "n": 2, "max_tokens": max_tokens})
            assert [each["logprobs"]["token_logprobs"][:5] for each in several] == [
                only["logprobs"]["token_logprobs"]
            ] * 2
            assert [len(each["logprobs"]["tokens"]) for each in several] == [5 + max_tokens] * 2
        for fields, param in (({"max_tokens": 0, "echo": False}, "max_tokens"), ({"logprobs": 65}, "logprobs")):
            error = (await http.post(PATH, json=body | fields)).json()["error"]
            assert error["param"] == param, error
