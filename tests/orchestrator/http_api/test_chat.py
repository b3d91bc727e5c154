"""/v1/chat/completions over a real server: whole and streamed, and the same text as over gRPC."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from bough.client import Client
from bough.protocol.generation import ChatPrompt, Finished, GenerateOptions, Message, Tokens
from bough.protocol.ids import ScopedId
from tests.fakes.http_stack import HttpStack, Json

PATH = "/v1/chat/completions"
QUESTION = "Why is the sky blue?"
BODY: Json = {
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 12,
    "temperature": 0.8,
    "seed": 3,
    "ignore_eos": True,
    "speculation": False,
}
GUESSED = {"speculation": {"budget": 8, "width": 2, "depth": 3}}


def text_of(answer: Json, index: int = 0) -> str:
    """Of a whole answer."""
    return answer["choices"][index]["message"]["content"]


def streamed_text(chunks: list[Json], index: int = 0) -> str:
    """What a client puts together from a stream."""
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(delta.get("content", "") for delta in deltas)


async def text_over_grpc(endpoint: HttpStack, options: GenerateOptions) -> str:
    """The same by the other front endpoint."""
    text = ""
    async with Client(endpoint.stack.addresses["orchestrator"]) as client:
        async for event in client.generate(ChatPrompt((Message("user", QUESTION),)), options):
            text += event.text if isinstance(event, Tokens | Finished) else ""
    return text


async def test_the_same_seed_gives_the_same_text_over_grpc_and_http_streamed_or_not(endpoint: HttpStack) -> None:
    options = GenerateOptions(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    expected = await text_over_grpc(endpoint, options)
    assert len(expected.split()) == 12
    for speculation in ({"speculation": False}, GUESSED):
        assert text_of(await endpoint.answer(PATH, BODY | speculation)) == expected
        assert streamed_text(await endpoint.chunks(PATH, BODY | speculation)) == expected
    unsigned = GenerateOptions(temperature=0.8, seed=2**64 - 5, max_tokens=12, ignore_eos=True)
    unsigned_text = await text_over_grpc(endpoint, unsigned)
    assert text_of(await endpoint.answer(PATH, BODY | {"seed": -5})) == unsigned_text != expected


async def test_a_whole_answer_has_the_fields_that_clients_read(endpoint: HttpStack) -> None:
    answer = await endpoint.answer(PATH, BODY | GUESSED)
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "quick")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": text_of(answer), "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    usage = answer["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    told = answer["metrics"]["speculative_decoding"]
    counts = told["acceptance_histogram"]
    assert sum(counts) == told["num_spec_steps"] > 0
    accepted = sum(accepted * steps for accepted, steps in enumerate(counts))
    assert accepted == told["num_accepted_draft_tokens"] <= told["num_draft_tokens"]
    assert told["mean_acceptance_length"] == 1 + accepted / told["num_spec_steps"]


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason(endpoint: HttpStack) -> None:
    chunks = await endpoint.chunks(PATH, BODY)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert (first["delta"], first["finish_reason"]) == ({"role": "assistant", "content": ""}, None)
    assert all(set(one["delta"]) == {"content"} and one["finish_reason"] is None for one in middle)
    assert (last["delta"], last["finish_reason"]) == ({}, "length")


async def test_usage_is_in_the_last_chunk_or_in_all(endpoint: HttpStack) -> None:
    whole = await endpoint.answer(PATH, BODY)
    *others, last = await endpoint.chunks(PATH, BODY | {"stream_options": {"include_usage": True}})
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    assert set(last["metrics"]) == set(whole["metrics"])
    sizes = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last["usage"][size] for size in sizes] == [whole["usage"][size] for size in sizes]
    every = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await endpoint.chunks(PATH, BODY | {"stream_options": every})
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert all(before <= after for before, after in pairwise(counted))
    assert (counted[0], counted[-1]) == (0, 12)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {whole["usage"]["prompt_tokens"]}


async def test_each_of_n_choices_has_its_own_seed_and_the_first_the_requests(endpoint: HttpStack) -> None:
    one = await endpoint.answer(PATH, BODY)
    three = await endpoint.answer(PATH, BODY | {"n": 3})
    texts = [text_of(three, index) for index in range(3)]
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert texts[0] == text_of(one)
    assert len(set(texts)) == 3
    chunks = await endpoint.chunks(PATH, BODY | {"n": 3})
    assert [streamed_text(chunks, index) for index in range(3)] == texts
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 36


async def test_stop_texts_end_the_text_before_them(endpoint: HttpStack) -> None:
    words = text_of(await endpoint.answer(PATH, BODY)).split()
    stopped = await endpoint.answer(PATH, BODY | {"stop": words[3]})
    assert text_of(stopped).split() == words[:3]
    assert (stopped["choices"][0]["finish_reason"], stopped["choices"][0]["stop_reason"]) == ("stop", words[3])
    chunks = await endpoint.chunks(PATH, BODY | {"stop": ["no such", words[3]]})
    assert streamed_text(chunks) == text_of(stopped)
    tokens = (await endpoint.answer("/tokenize", {"prompt": " " + words[2]}))["tokens"]
    assert len(tokens) == 1
    ended = await endpoint.answer(PATH, BODY | {"stop_token_ids": tokens})
    assert text_of(ended).split() == words[:2]
    assert [ended["choices"][0]["stop_reason"]] == tokens, "a number, as vLLM tells it: a text may be a stop text"
    streamed = await endpoint.chunks(PATH, BODY | {"stop_token_ids": tokens})
    assert [streamed[-1]["choices"][0]["stop_reason"]] == tokens


async def test_log_probabilities_have_the_bytes_of_each_token(endpoint: HttpStack) -> None:
    asked = BODY | {"logprobs": True, "top_logprobs": 2}
    answer = await endpoint.answer(PATH, asked)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == text_of(answer)
    for entry in content:
        assert entry["token"] == bytes(entry["bytes"]).decode()
        top = entry["top_logprobs"]
        assert [set(one) for one in top] == [{"token", "logprob", "bytes"}] * 2
        assert top[0]["logprob"] >= top[1]["logprob"]
        assert entry["logprob"] <= top[0]["logprob"] <= 0
    chunks = await endpoint.chunks(PATH, asked)
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for one in told if one for entry in one["content"]] == content
    none = await endpoint.answer(PATH, BODY | {"logprobs": True})
    assert [entry["top_logprobs"] for entry in none["choices"][0]["logprobs"]["content"]] == [[]] * 12


async def test_content_may_be_parts_and_a_developer_message_is_a_system_message(endpoint: HttpStack) -> None:
    async def tokens(*messages: Json) -> list[int]:
        return (await endpoint.answer("/tokenize", {"messages": [*messages]}))["tokens"]

    parts = [{"type": "text", "text": "Why is the "}, {"type": "text", "text": "sky blue?"}]
    assert await tokens({"role": "user", "content": parts}) == await tokens({"role": "user", "content": QUESTION})
    user = {"role": "user", "content": "x", "name": "somebody"}
    assert await tokens({"role": "developer", "content": "y"}, user) == await tokens(
        {"role": "system", "content": "y"}, user
    )


async def test_max_completion_tokens_is_the_newer_name(endpoint: HttpStack) -> None:
    del (body := dict(BODY))["max_tokens"]
    assert (await endpoint.answer(PATH, body | {"max_completion_tokens": 2}))["usage"]["completion_tokens"] == 2
    assert (await endpoint.answer(PATH, body | {"max_completion_tokens": 2, "max_tokens": 2}))["choices"]


async def test_without_a_limit_an_answer_continues_to_its_own_end(endpoint: HttpStack) -> None:
    del (body := BODY | {"ignore_eos": False})["max_tokens"]
    answer = await endpoint.answer(PATH, body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    limited = await endpoint.answer(PATH, body | {"max_tokens": 4000})
    assert text_of(answer) == text_of(limited)


@pytest.mark.parametrize("ways", [{"x_session_id": "by-header"}, {}])
async def test_a_session_is_kept_by_its_header_or_field(endpoint: HttpStack, ways: dict[str, str]) -> None:
    body = BODY if ways else BODY | {"session_id": "by-field"}
    name = next(iter(ways.values()), "by-field")
    messages: list[Json] = [{"role": "user", "content": f"{name} " * 40}]
    first = (await endpoint.post(PATH, body | {"messages": messages}, **ways)).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And now?"}]
    second = (await endpoint.post(PATH, body | {"messages": messages}, **ways)).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"] // 2
    assert await endpoint.stack.registry.load_session(ScopedId(name)) is not None


async def test_answers_have_the_clients_request_id_or_their_own(endpoint: HttpStack, tmp_path: Path) -> None:
    assert (await endpoint.post(PATH, BODY, x_request_id="mine")).headers["x-request-id"] == "mine"
    own = [(await endpoint.post(PATH, body)).headers["x-request-id"] for body in (BODY, {}, BODY)]
    assert len(set(own)) == 3
    assert (await endpoint.client.get("/version", headers={"x-request-id": "a b"})).headers["x-request-id"] != "a b"
