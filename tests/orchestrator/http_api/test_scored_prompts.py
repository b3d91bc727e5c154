"""Answers with log-probabilities of long prompts have a limited size, and several streams are sent as one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest

from bough.errors import Unavailable
from bough.protocol.decision import RoundTimings
from bough.protocol.generation import (
    Event,
    Finished,
    GenerateOptions,
    PromptLogprobs,
    SpeculationMetrics,
    Started,
    TextPrompt,
    Tokens,
    Usage,
)
from bough.protocol.sampling_params import PositionLogprobs, TokenLogprob
from orchestrator.http_api import exchange
from orchestrator.http_api.answers.answer import Answer, Head
from orchestrator.http_api.body import parse
from orchestrator.http_api.chat import ChatAnswer
from orchestrator.http_api.completions import MAX_ENTRIES, CompletionAnswer, completion_limits
from orchestrator.http_api.exchange import Exchange, Indexed, merged, scored_first
from orchestrator.http_api.fields.generation import CompletionFields, StreamOptions
from orchestrator.http_api.fields.options import RequestedOutput, choices
from orchestrator.http_api.responses.answer import ResponseAnswer
from orchestrator.tools.formats import HERMES

NUM_TOKENS = 200
POSITION = PositionLogprobs(TokenLogprob(5, -0.5), tuple(TokenLogprob(token, -1.0) for token in range(64)))
STARTED = Started("r", 1, 0, "m")
TOKENS = Tokens(
    (5,) * NUM_TOKENS, (True,) * NUM_TOKENS, ("x",) * NUM_TOKENS, (POSITION,) * NUM_TOKENS, 1, 0, RoundTimings(),
    begins=tuple(range(NUM_TOKENS)),
)  # fmt: skip
END = Finished("length", "", "", Usage(0, 0, 0), SpeculationMetrics(0, 0, 0, 0.0, (), 0), RoundTimings(), ())


class Answered(NamedTuple):
    """An answer as its client has it, and the threads that spelled its tokens."""

    status: int
    body: bytes
    threads: set[int]


async def scored(prompt_tokens: int, *, has_scores: bool = True) -> AsyncGenerator[Event]:
    yield Started("r", prompt_tokens, 0, "m")
    if has_scores:
        yield PromptLogprobs((5,) * NUM_TOKENS, (POSITION,) * (NUM_TOKENS - 1), tuple(range(NUM_TOKENS)))
    yield END


async def answered(prompt_tokens: int, num_choices: int, *, is_stream: bool) -> Answered:
    sent: list[Any] = []
    threads: set[int] = set()

    def spell(token_id: int) -> bytes:
        threads.add(threading.get_ident())
        return "☃".encode() + bytes([32 + token_id])

    async def send(message: Any) -> None:
        sent.append(message)

    head = Head("id", 0, is_stream)
    answer = CompletionAnswer(head, ["x"], num_choices, StreamOptions(), lambda _: spell, prompt_logprobs=64)
    streams = [scored(prompt_tokens, has_scores=index == 0) for index in range(num_choices)]
    await Exchange(lambda: nullcontext(streams), answer, {})({"type": "http"}, connected, send)
    return Answered(sent[0]["status"], b"".join(message["body"] for message in sent[1:]), threads)


async def connected() -> Any:
    """Never says that the client has gone."""
    await asyncio.Event().wait()


class TenantOfOne:
    """Lets any number of requests in, of which those with scores have them; notes which have begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    @contextmanager
    def together(self, wanted: Sequence[RequestedOutput]) -> Iterator[list[AsyncGenerator[Event]]]:
        yield [self._events(one.options) for one in wanted]

    async def _events(self, options: GenerateOptions) -> AsyncGenerator[Event]:
        self.begun.append(options.request_id)
        async for event in scored(NUM_TOKENS, has_scores=options.prompt_logprobs is not None):
            if isinstance(event, PromptLogprobs):
                assert self.begun == [options.request_id], "nobody computes the prompt beside it"
            yield event


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_a_prompt_is_scored_once_for_all_choices(max_tokens: int) -> None:
    fields = parse(CompletionFields, json.dumps({"prompt": "x", "n": 3, "echo": True, "logprobs": 64}).encode())
    limits = completion_limits(fields.model_copy(update={"max_tokens": max_tokens}))
    wanted = choices(fields, (TextPrompt("x"),), limits, "id", "")
    assert [one.options.prompt_logprobs for one in wanted] == [64, None, None]
    tenant, sent = TenantOfOne(), []

    async def send(message: Any) -> None:
        sent.append(message)

    answer = CompletionAnswer(Head("id", 0), ["x"], 3, StreamOptions(), lambda _: lambda _: b"x", prompt_logprobs=64)
    exchange = Exchange(lambda: scored_first(tenant, wanted), answer, {})
    await exchange({"type": "http"}, connected, send)
    whole = json.loads(b"".join(message["body"] for message in sent[1:]))
    first, *others = [choice["logprobs"] for choice in whole["choices"]]
    assert len(first["tokens"]) == NUM_TOKENS
    assert others == [first, first]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 3
    assert tenant.begun == (["id", "id-1", "id-2"] if max_tokens else ["id"])


@pytest.mark.parametrize("is_stream", [False, True])
async def test_scores_that_would_take_too_much_memory_are_refused(is_stream: bool) -> None:
    """A small body asked for gigabytes, with the most choices of a prompt as long as the context."""
    most = MAX_ENTRIES // (2 * 68)
    assert (await answered(most, 2, is_stream=is_stream)).status == 200
    refused = await answered(most + 1, 2, is_stream=is_stream)
    error = json.loads(refused.body)["error"]
    assert (refused.status, error["param"], refused.threads) == (400, "echo", set())
    assert error["message"].startswith(
        f"echo: n x tokens of the prompts x (logprobs + 4) must be at most {MAX_ENTRIES}"
    )


async def generated() -> AsyncGenerator[Event]:
    yield STARTED
    yield TOKENS
    yield END


async def broken_off() -> AsyncGenerator[Event]:
    yield STARTED
    yield TOKENS
    raise Unavailable("the target has gone")


def chat() -> Answer:
    return ChatAnswer(Head("id", 0), 1, StreamOptions(), lambda _: lambda _: b"x", None, lambda _: HERMES)


def response() -> Answer:
    return ResponseAnswer(Head("id", 0, is_stream=True), {}, lambda _: lambda _: b"x", None, lambda _: HERMES)


@pytest.mark.parametrize(
    ("make_answer", "events"),
    [(chat, generated), (response, generated), (response, broken_off)],
    ids=["whole", "the last event of a stream", "a response that fails, which repeats itself"],
)
async def test_many_log_probabilities_are_written_off_the_event_loop(
    make_answer: Callable[[], Answer],
    events: Callable[[], AsyncGenerator[Event]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only those of prompts were: while megabytes of others were written all streams waited."""
    threads, in_steps, sent = list[int](), exchange._in_steps, list[Any]()

    def noted(value: dict[str, object]) -> bytes:
        threads.append(threading.get_ident())
        return in_steps(value)

    async def send(message: Any) -> None:
        sent.append(message)

    monkeypatch.setattr(exchange, "_in_steps", noted)
    await Exchange(lambda: nullcontext([events()]), make_answer(), {})({"type": "http"}, connected, send)
    assert sent[0]["status"] == 200
    assert b"".join(message["body"] for message in sent[1:]).count(b'"top_logprobs"') >= NUM_TOKENS
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stream_keeps_no_log_probabilities(is_stream: bool) -> None:
    """Otherwise a long answer would keep megabytes that it has sent already."""
    head = Head("id", 0, is_stream)
    chat = ChatAnswer(head, 1, StreamOptions(), lambda _: lambda _: b"x", None, lambda _: HERMES)
    text = CompletionAnswer(head, [""], 1, StreamOptions(), lambda _: lambda _: b"x")
    for answer in (chat, text):
        chunks = [chunk for event in (STARTED, TOKENS, END) for chunk in answer.chunks(0, event)]
        assert any(choice["logprobs"] for chunk in chunks for choice in chunk["choices"])
        kept = answer.whole()["choices"][0]["logprobs"]
        assert any(kept.values()) is not is_stream


FOR_EVER = 3600.0


def event(number: int) -> Event:
    return Started("", number, 0, "")


class Source:
    """A stream that counts what was read of it, and knows whether it was closed."""

    def __init__(self, num: int, error: Exception | None = None, waits_at: int = -1) -> None:
        self.num_made, self.is_closed, self.may_go_on = 0, False, asyncio.Event()
        self._num, self._error, self._waits_at = num, error, waits_at

    async def events(self) -> AsyncGenerator[Event]:
        try:
            for number in range(self._num):
                if number == self._waits_at:
                    await self.may_go_on.wait()
                self.num_made += 1
                yield event(number)
            if self._error is not None:
                raise self._error
        finally:
            self.is_closed = True


async def test_every_stream_is_complete_and_in_order() -> None:
    sources = [Source(3), Source(0), Source(5)]
    seen = [one async for one in merged([source.events() for source in sources], FOR_EVER)]
    for number, source in enumerate(sources):
        own = [one.event for one in seen if one is not None and one.number == number]
        assert own == [event(index) for index in range(source.num_made)]
    assert [source.num_made for source in sources] == [3, 0, 5]


async def test_no_stream_is_read_more_than_one_event_ahead() -> None:
    source = Source(100)
    events = merged([source.events()], FOR_EVER)
    for taken in range(1, 4):
        await anext(events)
        await asyncio.sleep(0.01)
        assert source.num_made <= taken + 2, "one that waits, and one that is held out"
    await events.aclose()
    assert source.is_closed


async def test_silence_is_reported_and_loses_nothing() -> None:
    source = Source(2, waits_at=1)
    events = merged([source.events()], 0.01)
    assert await anext(events) == Indexed(0, event(0))
    assert await anext(events) is None
    assert await anext(events) is None
    source.may_go_on.set()
    assert [one async for one in events if one is not None] == [Indexed(0, event(1))]


async def test_the_first_error_ends_all_streams() -> None:
    held, failing = Source(2, waits_at=1), Source(1, error=Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        async for _ in merged([held.events(), failing.events()], FOR_EVER):
            pass
    assert held.is_closed
    assert failing.is_closed
