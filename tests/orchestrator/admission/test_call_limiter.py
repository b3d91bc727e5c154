"""What is too much is refused by its number and size before it is decoded, and too long a prompt by its limit."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from bough.errors import ContextExceeded, Exhausted, InvalidRequest
from bough.model.checkpoint.model_places import load_tokenizer_files
from bough.pb import generation_pb2 as pb
from bough.protocol import codec_generation as wire
from bough.protocol.generation import ChatPrompt, Message, Prompt, Resume, Speculation, TextPrompt, TokenPrompt
from bough.rpc import server
from bough.tokenization.tokenizer import Tokenizer
from bough.trees.tree_plan import StaticShape
from orchestrator import service
from orchestrator.admission.admission import Admission
from orchestrator.admission.call_limiter import (
    BYTES_PER_TOKEN,
    MAX_BYTES,
    MAX_OTHER_CALLS,
    MAX_TOKENIZING,
    SMALL_BYTES,
    SPARE_CALLS,
    CallLimiter,
)
from orchestrator.admission.size_limits import require_room, require_size_for_any
from tests.fakes.stage import MAX_CONTEXT, PROMPT, SHORT, Stage, finish, orchestrating
from tests.fakes.waiting import until
from tests.orchestrator.cluster.test_tokenizer_threads import Held


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all large messages that were decoded."""
    sizes: list[int] = []
    decode: Callable[..., Any] = server.decoded

    def noted(data: bytes, *args: Any) -> Any:
        if len(data) > 1000:
            sizes.append(len(data))
        return decode(data, *args)

    monkeypatch.setattr(server, "decoded", noted)
    return sizes


async def test_a_message_larger_than_any_prompt_is_not_decoded(stage: Stage, decoded: list[int]) -> None:
    async with orchestrating(stage) as orchestrator:
        with pytest.raises(InvalidRequest, match=r"message: must have at most 3200000 bytes, got 35\d{5}"):
            await finish(orchestrator, TextPrompt("x" * 3_500_000))
        assert decoded == []
        with pytest.raises(InvalidRequest, match="text: 500000 characters"):
            await finish(orchestrator, TextPrompt("x" * 500_000))
        assert len(decoded) == 1


async def test_a_call_beyond_the_limit_is_not_decoded(stage: Stage, decoded: list[int]) -> None:
    stage.target.may_answer.clear()
    async with orchestrating(stage, "--max-running", "1", "--max-waiting", "1") as orchestrator:
        orchestrator.requests.call_limiter.spare_calls = 0
        running = [asyncio.create_task(finish(orchestrator)) for _ in range(2)]
        await until(lambda: orchestrator.requests.loads().num_requests_waiting)
        with pytest.raises(Exhausted, match="2 requests run and wait") as caught:
            await finish(orchestrator, TextPrompt("x" * 2000))
        assert caught.value.retry_seconds is not None
        assert decoded == []
        assert (await orchestrator.client.loads()).num_requests_waiting == 1  # which is still reported
        stage.target.may_answer.set()
        assert [(await task).usage.completion_tokens for task in running] == [3, 3]
        assert (await finish(orchestrator, TextPrompt("x" * 2000))).usage.prompt_tokens == 2000
        assert decoded


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        (TokenPrompt((1,) * 150_000), {}, "token_ids: must have at most 100000 entries, got 150000"),
        (ChatPrompt((Message("", ""),) * 150_000), {}, "message: must have at most 32768 fields, got 32769 or more"),
        (
            PROMPT,
            {"resume": Resume(150_000, (1,) * 150_000)},
            r"resume\.token_ids: must have at most .* entries, got 150000",
        ),
        (PROMPT, {"stop": ("x",) * 7_000}, "stop: must have at most 64 entries, got 7000"),
        (
            PROMPT,
            {"speculation": Speculation(growth=StaticShape((0,) * 150_000))},
            r"speculation\.growth\.shape\.parents: must have at most .* entries, got 150000",
        ),
    ],
)
async def test_too_long_lists_are_counted_without_decoding(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, prompt: Prompt, changes: dict[str, Any], message: str
) -> None:
    """A call of 4 MiB was decoded, in 43 ms and several times its size, to be refused by its number of token ids."""
    decoded = list[int]()

    class Noted:
        DESCRIPTOR = pb.GenerateRequest.DESCRIPTOR

        @staticmethod
        def FromString(data: bytes) -> pb.GenerateRequest:
            decoded.append(len(data))
            return pb.GenerateRequest.FromString(data)

    monkeypatch.setattr(service, "pb", SimpleNamespace(GenerateRequest=Noted))
    async with orchestrating(stage) as orchestrator:
        with pytest.raises(InvalidRequest, match=message):
            await finish(orchestrator, prompt, replace(SHORT, **changes))
        assert not decoded
        await finish(orchestrator)
    assert len(decoded) == 1


async def test_streams_continue_while_a_long_list_is_read(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(wire.request_from_wire)
    read = wire.request_from_wire
    monkeypatch.setattr(wire, "request_from_wire", lambda m: held(m) if len(m.token_ids.ids) > 10_000 else read(m))
    async with orchestrating(stage) as orchestrator:
        slow = asyncio.create_task(finish(orchestrator, TokenPrompt((1,) * 20_000)))
        await until(held.has_begun.is_set)
        assert (await finish(orchestrator, TokenPrompt((1, 2)))).usage.completion_tokens == 3
        held.may_go_on.set()
        assert (await slow).usage.prompt_tokens == 20_000


async def test_both_apis_share_one_limit(stage: Stage) -> None:
    """Each once counted its own, so that twice as many could be decoded and held as may."""
    stage.target.may_answer.clear()
    body = {"prompt": "hello", "max_tokens": 3, "temperature": 0}
    flags = ("--max-running", "1", "--max-waiting", "1", "--http-port", "0")
    async with orchestrating(stage, *flags) as orchestrator, httpx.AsyncClient(timeout=60) as client:
        orchestrator.requests.call_limiter.spare_calls = 0
        url = f"{orchestrator.requests.http_url}/v1/completions"
        running = asyncio.create_task(finish(orchestrator))
        await until(lambda: orchestrator.requests.loads().num_requests_running)
        waiting = asyncio.create_task(client.post(url, json=body))
        await until(lambda: orchestrator.requests.loads().num_requests_waiting)
        refusal = await client.post(url, content=b"{", headers={"content-type": "application/json"})
        assert refusal.status_code == 429, "before it is decoded, which is no JSON"
        assert int(refusal.headers["retry-after-ms"]) >= 1000
        assert refusal.json()["error"]["message"].startswith("2 requests run and wait")
        with pytest.raises(Exhausted, match="2 requests run and wait"):
            await finish(orchestrator)
        stage.target.may_answer.set()
        assert (await running).usage.completion_tokens == 3
        assert (await waiting).json()["usage"]["completion_tokens"] == 3


async def test_a_prompt_that_fits_no_target_does_not_wait(stage: Stage) -> None:
    stage.target.may_answer.clear()
    async with orchestrating(stage, "--max-running", "1") as orchestrator:
        first = asyncio.create_task(finish(orchestrator))
        await until(lambda: stage.target.asked)
        with pytest.raises(InvalidRequest, match="text: 400001 characters"):
            await asyncio.wait_for(finish(orchestrator, TextPrompt("x" * (4 * MAX_CONTEXT + 1))), 20)
        stage.target.may_answer.set()
        await first


# By itself


def refused(call_limiter: CallLimiter, method: str, num_bytes: int = 0) -> Exhausted:
    with pytest.raises(Exhausted) as caught, call_limiter.entering(method, num_bytes):
        pass
    return caught.value


def test_calls_are_counted_until_they_end() -> None:
    call_limiter = CallLimiter(Admission(2, 3), lambda: 100)
    with ExitStack() as inside:
        for _ in range(5 + SPARE_CALLS):
            inside.enter_context(call_limiter.entering("Generate", 10))
        assert refused(call_limiter, "Generate").retry_seconds is not None
        for _ in range(MAX_OTHER_CALLS):
            inside.enter_context(call_limiter.entering("GetLoads", 0))
        assert f"{MAX_OTHER_CALLS} calls are being answered" in str(refused(call_limiter, "Abort"))
        with call_limiter.entering("Check", 0), call_limiter.entering("Watch", 0):
            pass
    for method in ("Generate", "Abort"):
        with call_limiter.entering(method, 10):
            pass


def test_tokenized_texts_leave_room_for_other_calls() -> None:
    """One client's long ones took the places of all calls, so nobody could abort a request or query health."""
    failed = Counter[str]()
    call_limiter = CallLimiter(Admission(2, 3), lambda: 100, failed)
    with ExitStack() as inside:
        for _ in range(MAX_TOKENIZING):
            inside.enter_context(call_limiter.entering("Tokenize", 0))
        assert f"{MAX_TOKENIZING} calls are being answered" in str(refused(call_limiter, "Tokenize"))
        for method in ("Generate", "Abort", "GetLoads"):
            with call_limiter.entering(method, 0):
                pass
    assert failed == {"Exhausted": 1}, "which is told"
    with call_limiter.entering("Tokenize", 0):
        pass


def test_the_bytes_of_all_calls_together_are_limited() -> None:
    size = MAX_BYTES // 10
    call_limiter = CallLimiter(Admission(50, 50), lambda: size)
    with ExitStack() as inside:
        for _ in range(10):
            inside.enter_context(call_limiter.entering("Generate", size))
        assert refused(call_limiter, "Generate", size).retry_seconds is not None
    with call_limiter.entering("Generate", size):
        pass


@pytest.mark.parametrize(("context", "most"), [(0, 10**9), (1000, SMALL_BYTES), (100_000, 100_000 * BYTES_PER_TOKEN)])
def test_a_message_may_be_as_large_as_a_context_needs(context: int, most: int) -> None:
    call_limiter = CallLimiter(Admission(1, 1), lambda: context)
    if context:
        with call_limiter.entering("Generate", most):
            pass
        with pytest.raises(InvalidRequest, match=f"message: must have at most {most} bytes, got {most + 1}"):
            call_limiter.entering("Generate", most + 1).__enter__()
    else:
        with call_limiter.entering("Generate", MAX_BYTES):  # nothing is known to judge by yet
            pass


LIMIT = "--max-context of the target; the model's own limit is 8192"


def test_a_limit_other_than_the_models_own_is_named(tiny: Path) -> None:
    """An agent with a first request of 3,000 tokens could not be helped: nothing said what the 2,048 came from."""
    words = f"this model's maximum context length is 8 tokens, .*; it is limited by {LIMIT}$"
    with pytest.raises(ContextExceeded, match=words):
        require_room([1] * 9, 8, LIMIT)
    with pytest.raises(ContextExceeded, match=words):
        require_size_for_any(TokenPrompt((1,) * 9), [Tokenizer(load_tokenizer_files(tiny))], 8, LIMIT)


def test_the_models_own_limit_is_reported_without_its_flag() -> None:
    with pytest.raises(ContextExceeded, match=r"for the output$"):
        require_room([1] * 9, 8)
