"""The end of the context: requests beyond it, over both APIs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from bough.client import Client
from bough.errors import ContextExceeded
from bough.protocol.generation import Finished, GenerateOptions, TokenPrompt
from bough.protocol.sampling_params import UNLIMITED
from orchestrator.admission.call_limiter import SMALL_BYTES
from tests.fakes.http_stack import HttpStack, Json, http_stack
from tests.fakes.simulated import QUICK

CONTEXT, PROMPT = 64, (5,) * 40
ROOM = CONTEXT - len(PROMPT)
BODY: Json = {"prompt": PROMPT, "seed": 5, "ignore_eos": True}
TOLD = f"max_tokens: at most {ROOM} fit the model's maximum context length of {CONTEXT} tokens after the prompt, got "


@pytest.fixture(scope="module")
async def endpoint(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpStack]:
    target = QUICK["target"] | {"max_context": CONTEXT}
    async with http_stack(tmp_path_factory.mktemp("context"), target=target) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_tokens", "is_told"), [(ROOM - 1, False), (ROOM, False), (ROOM + 1, True), (32_000, True), (UNLIMITED, False)]
)
async def test_max_tokens_beyond_the_context_are_accepted_with_a_warning(
    endpoint: HttpStack, max_tokens: int, is_told: bool
) -> None:
    """Agents send one large default to every model: refused, they have no use of it; untold, a cut text looks whole."""
    warnings = [f"{TOLD}{max_tokens}"] if is_told else []
    length = min(ROOM, max_tokens)
    answer = await endpoint.answer("/v1/completions", BODY | {"max_tokens": max_tokens, "n": 2})
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    assert answer.get("warnings", []) == warnings
    assert answer["usage"]["completion_tokens"] == 2 * length
    asked = BODY | {"max_tokens": max_tokens, "stream_options": {"include_usage": True}}
    assert (await endpoint.chunks("/v1/completions", asked))[-1].get("warnings", []) == warnings
    async with Client(endpoint.stack.addresses["orchestrator"]) as client:
        options = GenerateOptions(seed=5, max_tokens=max_tokens, ignore_eos=True)
        *_, last = [event async for event in client.generate(TokenPrompt(PROMPT), options)]
    assert isinstance(last, Finished)
    assert (last.usage.completion_tokens, list(last.warnings)) == (length, warnings)


async def test_an_output_that_ends_earlier_is_complete_for_any_max_tokens(endpoint: HttpStack) -> None:
    answer = await endpoint.answer("/v1/completions", BODY | {"max_tokens": 5})
    stop = answer["choices"][0]["text"][-2:]
    stopped = await endpoint.answer("/v1/completions", BODY | {"max_tokens": 32_000, "stop": stop})
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert "warnings" not in stopped


async def test_a_prompt_that_is_too_long_has_the_code_that_clients_know(endpoint: HttpStack) -> None:
    """They shorten the conversation then, and ask again. litellm and LangChain know it by the message."""
    oversized = "word " * (SMALL_BYTES // 5)  # refused by the size of its body
    for param, text in (("prompt", [5] * CONTEXT), ("prompt", "word " * 1000), ("body", oversized)):
        status, error = await endpoint.refusal("/v1/completions", {"prompt": text})
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert f"prompt is too long: this model's maximum context length is {CONTEXT} tokens" in error["message"]
    async with Client(endpoint.stack.addresses["orchestrator"]) as client:
        with pytest.raises(ContextExceeded):
            async for _ in client.generate(TokenPrompt((5,) * CONTEXT), GenerateOptions()):
                pass
