"""Answers with the log-probabilities of long prompts: limited in size, and spelled and written off the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest

from bough.protocol.generation import Event, Finished, PromptLogprobs, SpeculationMetrics, Started, Usage
from bough.protocol.messages import RoundTimings
from bough.protocol.sampling_params import PositionLogprobs, TokenLogprob
from orchestrator.http_api.answer import Head, StreamTelling
from orchestrator.http_api.completions import MAX_ENTRIES, CompletionAnswer
from orchestrator.http_api.exchange import MANY_ENTRIES, Exchange

NUM_TOKENS = 200
POSITION = PositionLogprobs(TokenLogprob(5, -0.5), tuple(TokenLogprob(token, -1.0) for token in range(64)))
END = Finished("length", "", "", Usage(0, 0, 0), SpeculationMetrics(0, 0, 0, 0.0, (), 0), RoundTimings(), ())


class Answered(NamedTuple):
    """An answer as its client has it, and the threads that spelled its tokens."""

    status: int
    body: bytes
    threads: set[int]


async def scored(prompt_tokens: int) -> AsyncGenerator[Event]:
    yield Started("r", prompt_tokens, 0, "m")
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

    answer = CompletionAnswer(Head("id", 0), ["x"], num_choices, StreamTelling(), lambda _: spell, prompt_logprobs=64)
    streams = [scored(prompt_tokens) for _ in range(num_choices)]
    await Exchange(lambda: nullcontext(streams), answer, is_stream, {}, 10.0)({"type": "http"}, connected, send)
    return Answered(sent[0]["status"], b"".join(message["body"] for message in sent[1:]), threads)


async def connected() -> Any:
    """Never says that the client has gone."""
    await asyncio.Event().wait()


async def test_scores_are_spelled_off_the_event_loop() -> None:
    whole, stream = [await answered(NUM_TOKENS, 1, is_stream=is_stream) for is_stream in (False, True)]
    assert NUM_TOKENS * 68 > MANY_ENTRIES
    for each in (whole, stream):
        assert each.status == 200
        assert each.threads
        assert threading.get_ident() not in each.threads
    (choice,) = json.loads(whole.body)["choices"]
    chunks = [json.loads(line[6:]) for line in stream.body.decode().split("\n\n") if line.startswith("data: {")]
    (told,) = [one["logprobs"] for chunk in chunks for one in chunk["choices"] if one["logprobs"]]
    assert told == choice["logprobs"]
    assert {name: len(values) for name, values in told.items()} == dict.fromkeys(told, NUM_TOKENS)
    assert "☃".encode() in whole.body


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
