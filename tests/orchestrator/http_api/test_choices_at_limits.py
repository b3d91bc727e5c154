"""Choices of a request are admitted together, refused together, or refused for good where they never fit."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from bough.client import Client
from bough.protocol.generation import GenerateOptions, Prompt, TextPrompt
from bough.tokenization.tokenizer import Tokenizer
from orchestrator.admission.admission import Admission
from orchestrator.cluster.tokenizer_threads import NUM_THREADS
from orchestrator.opening import opening
from orchestrator.opening.prompt import whole_prompt
from orchestrator.serving.tenants import Callers
from tests.fakes.http_stack import HttpStack, Json, error_of
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow  # running services are called
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES: Json = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "speculation": False}
TEXT: Json = {"prompt": "x", "ignore_eos": True, "speculation": False}


def limited(endpoint: HttpStack, monkeypatch: pytest.MonkeyPatch, max_running: int, max_waiting: int) -> Admission:
    admission = Admission(max_running, max_waiting)
    monkeypatch.setattr(endpoint.stack.requests, "admission", admission)
    return admission


async def test_more_choices_than_ever_fit_are_an_invalid_request(
    endpoint: HttpStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were refused with a delay, forever, and each time began what was then thrown away."""
    limited(endpoint, monkeypatch, max_running=1, max_waiting=1)
    num_before = endpoint.stack.requests.loads().num_requests_total
    bodies: list[tuple[str, Json, str]] = [
        (COMPLETIONS, TEXT | {"n": 3}, "n: must be at most 2, as 2 requests"),
        (CHAT, MESSAGES | {"n": 3}, "n: must be at most 2, as 2 requests"),
        (COMPLETIONS, TEXT | {"prompt": ["x", "y"], "n": 2}, "n: must be at most 1 with 2 prompts, as 2 requests"),
        (COMPLETIONS, TEXT | {"prompt": ["x"] * 3}, "prompt: must have at most 2 entries, as 2 requests"),
        (COMPLETIONS, TEXT | {"prompt": ["x"] * 200}, "prompt: must have at most 2 entries, as 2 requests"),
    ]
    for path, body, message in bodies:
        for is_stream in (False, True):
            status, error = await endpoint.refusal(path, body | {"max_tokens": 1, "stream": is_stream})
            assert (status, error["param"]) == (400, message.partition(":")[0]), error
            assert error["message"].startswith(message)
    assert endpoint.stack.requests.loads().num_requests_total == num_before
    for body in (TEXT | {"n": 2}, TEXT | {"prompt": ["x", "y"]}):
        assert len((await endpoint.answer(COMPLETIONS, body | {"max_tokens": 1}))["choices"]) == 2


async def test_choices_that_do_not_fit_now_are_all_refused_before_one_begins(
    endpoint: HttpStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, admission = endpoint.stack.requests, limited(endpoint, monkeypatch, max_running=2, max_waiting=1)
    running = asyncio.create_task(endpoint.client.post(COMPLETIONS, json=TEXT | {"max_tokens": 4000}))
    await until(lambda: requests.loads().num_requests_running == 1)
    num_before, num_refused = requests.loads().num_requests_total, requests.totals.failed["Exhausted"]
    for is_stream in (False, True):
        refused = await endpoint.post(COMPLETIONS, TEXT | {"max_tokens": 1, "n": 3, "stream": is_stream})
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after-ms"]) >= 1000
        assert "1 requests run and 0 wait, and 3 more" in error_of(refused)["message"]
    assert requests.loads().num_requests_total == num_before
    assert requests.totals.failed["Exhausted"] == num_refused + 2
    assert len((await endpoint.answer(COMPLETIONS, TEXT | {"max_tokens": 1, "n": 2}))["choices"]) == 2
    running.cancel()
    await until(lambda: not requests.streams)
    assert len((await endpoint.answer(COMPLETIONS, TEXT | {"max_tokens": 1, "n": 3}))["choices"]) == 3
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_choices_that_have_not_begun_are_counted(endpoint: HttpStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a prompt was scored its other choices waited and were not running: fewer than none ran, and the call of
    the loads failed, by which a supervisor takes its program for broken."""
    limited(endpoint, monkeypatch, max_running=1, max_waiting=2)
    tenant = Callers(endpoint.stack.requests).tenant(())
    wanted = [(TextPrompt("x"), GenerateOptions(request_id=f"choice {index}")) for index in range(3)]
    async with Client(endpoint.stack.addresses["orchestrator"]) as client:
        with tenant.together(wanted):
            loads = await client.loads()
        assert (loads.num_requests_running, loads.num_requests_waiting) == (1, 2)
        loads = await client.loads()
        assert (loads.num_requests_running, loads.num_requests_waiting) == (0, 0)


async def test_a_prompt_is_tokenized_once_for_all_choices(endpoint: HttpStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """New requests waited while the threads that tokenize read a long prompt for each of a hundred choices."""
    made: list[Prompt] = []

    def noted(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
        made.append(prompt)
        return whole_prompt(prompt, tokenizer, vocab_size)

    monkeypatch.setattr(opening, "whole_prompt", noted)
    for text in ("x", "y"):
        answer = await endpoint.answer(COMPLETIONS, TEXT | {"prompt": text, "n": 16, "max_tokens": 1})
        assert answer["usage"]["completion_tokens"] == 16
        assert {*made} == {TextPrompt(text)}
        assert len(made) <= NUM_THREADS, "each at once, the others later"
        made.clear()


async def test_a_choice_waits_as_long_as_its_siblings_take(
    endpoint: HttpStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that it may wait for a place was over, and all of the answer lost, also what was whole."""
    limited(endpoint, monkeypatch, max_running=1, max_waiting=2)
    requests = endpoint.stack.requests
    monkeypatch.setattr(requests, "config", replace(requests.config, queue_timeout=0.05))
    answer = await endpoint.answer(COMPLETIONS, TEXT | {"max_tokens": 60, "n": 3})
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3


async def test_a_client_that_leaves_releases_the_turns_of_all_choices(
    endpoint: HttpStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = limited(endpoint, monkeypatch, max_running=1, max_waiting=4)
    asking = asyncio.create_task(endpoint.client.post(COMPLETIONS, json=TEXT | {"max_tokens": 4000, "n": 4}))
    await until(lambda: admission.num_waiting == 3)
    asking.cancel()
    await until(lambda: not admission.num_waiting and not admission.num_running)
    assert (await endpoint.answer(COMPLETIONS, TEXT | {"max_tokens": 1}))["choices"]
