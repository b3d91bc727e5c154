"""/v1/completions and the smaller paths over a real server."""

from __future__ import annotations

from bough.client import Client
from bough.protocol.generation import Finished, GenerateOptions, TextPrompt, Tokens
from tests.fakes.http_stack import HttpStack, Json

PATH = "/v1/completions"
BODY: Json = {"prompt": "Once upon", "seed": 5, "max_tokens": 6, "ignore_eos": True, "speculation": False}


async def tokens_of(endpoint: HttpStack, text: str) -> list[int]:
    return (await endpoint.answer("/tokenize", {"prompt": text}))["tokens"]


async def test_the_same_seed_gives_the_same_text_over_grpc_and_http_streamed_or_not(endpoint: HttpStack) -> None:
    text = ""
    async with Client(endpoint.stack.addresses["orchestrator"]) as client:
        options = GenerateOptions(seed=5, max_tokens=6, ignore_eos=True)
        async for event in client.generate(TextPrompt("Once upon"), options):
            text += event.text if isinstance(event, Tokens | Finished) else ""
    answer = await endpoint.answer(PATH, BODY)
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    chunks = await endpoint.chunks(PATH, BODY)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


async def test_prompts_are_texts_or_tokens_one_or_several(endpoint: HttpStack) -> None:
    texts = ["Once upon", "a time"]
    alone = [(await endpoint.answer(PATH, BODY | {"prompt": text}))["choices"][0]["text"] for text in texts]
    tokens = [await tokens_of(endpoint, text) for text in texts]
    for prompt in (texts, tokens, [texts[0], tokens[1]]):
        answer = await endpoint.answer(PATH, BODY | {"prompt": prompt})
        assert [choice["text"] for choice in answer["choices"]] == alone
        assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))
    one = await endpoint.answer(PATH, BODY | {"prompt": tokens[0]})
    assert [choice["text"] for choice in one["choices"]] == alone[:1]
    two = await endpoint.answer(PATH, BODY | {"prompt": texts, "n": 2})
    assert [choice["index"] for choice in two["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in two["choices"][::2]] == alone, "prompt by prompt"
    assert two["usage"]["completion_tokens"] == 4 * BODY["max_tokens"]


async def test_log_probabilities_have_their_tokens_offsets_in_the_text(endpoint: HttpStack) -> None:
    answer = await endpoint.answer(PATH, BODY | {"logprobs": 2})
    (choice,) = answer["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    for token, logprob, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert top[token] == logprob
        assert len(top) in (2, 3), "the likeliest, and the one that was drawn"
    chunks = await endpoint.chunks(PATH, BODY | {"logprobs": 2})
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for name, values in told.items():
        assert [value for part in parts if part for value in part[name]] == values


async def test_text_held_back_for_a_stop_text_changes_no_offset(endpoint: HttpStack) -> None:
    """A token's place was taken from the text sent so far, which lacks what may begin a stop text."""
    told = (await endpoint.answer(PATH, BODY | {"logprobs": 0}))["choices"][0]["logprobs"]
    begins = [sum(map(len, told["tokens"][:index])) for index in range(len(told["tokens"]))]
    held, ended = "".join(told["tokens"][1:4]) + "#", "".join(told["tokens"][4:6])[1:]
    for stop in ([held], [held, ended]):
        body = BODY | {"logprobs": 0, "stop": stop}
        assert (await endpoint.answer(PATH, body))["choices"][0]["logprobs"]["text_offset"] == begins
        parts = [chunk["choices"][0]["logprobs"] for chunk in await endpoint.chunks(PATH, body)]
        assert [offset for part in parts if part for offset in part["text_offset"]] == begins


async def test_echo_begins_with_the_prompt(endpoint: HttpStack) -> None:
    plain = (await endpoint.answer(PATH, BODY))["choices"][0]["text"]
    for prompt in ("Once upon", await tokens_of(endpoint, "Once upon")):
        body = BODY | {"prompt": prompt, "echo": True}
        assert (await endpoint.answer(PATH, body))["choices"][0]["text"] == "Once upon" + plain
        chunks = await endpoint.chunks(PATH, body)
        assert chunks[0]["choices"][0]["text"] == "Once upon"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Once upon" + plain


async def test_max_tokens_is_16_by_default(endpoint: HttpStack) -> None:
    del (body := dict(BODY))["max_tokens"]
    assert (await endpoint.answer(PATH, body))["usage"]["completion_tokens"] == 16


async def test_texts_are_tokenized_and_tokens_are_detokenized(endpoint: HttpStack) -> None:
    text = "naïve ☃"
    read = await endpoint.answer("/tokenize", {"prompt": text, "return_token_strs": True})
    assert read["count"] == len(read["tokens"]) == len(read["token_strs"])
    assert read["max_model_len"] == (await endpoint.client.get("/v1/models")).json()["data"][0]["max_model_len"]
    assert "".join(read["token_strs"]).startswith("na")
    assert (await endpoint.answer("/detokenize", {"tokens": read["tokens"]})) == {"prompt": text}
    assert (await endpoint.answer("/detokenize", {"tokens": []})) == {"prompt": ""}
    for body in ({}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}):
        status, error = await endpoint.refusal("/tokenize", body)
        assert (status, error["param"]) == (400, "prompt")
    status, error = await endpoint.refusal("/detokenize", {"tokens": [10**6]})
    assert (status, error["param"]) == (400, "tokens[0]")


async def test_models_are_listed_and_looked_up(endpoint: HttpStack) -> None:
    (card,) = (await endpoint.client.get("/v1/models")).json()["data"]
    assert (card["id"], card["object"], card["owned_by"]) == ("quick", "model", "bough")
    assert isinstance(card["created"], int)
    assert (await endpoint.client.get("/v1/models/quick")).json() == card
    missing = await endpoint.client.get("/v1/models/org/none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    answer = await endpoint.answer(PATH, BODY | {"model": "quick"})
    assert answer["model"] == "quick"


async def test_operators_see_health_version_and_metrics(endpoint: HttpStack) -> None:
    assert (await endpoint.client.get("/health")).status_code == 200
    assert set((await endpoint.client.get("/version")).json()) == {"version"}
    await endpoint.answer(PATH, BODY)
    figures = await endpoint.client.get("/metrics")
    assert figures.headers["content-type"].startswith("text/plain")
    assert 'vllm:generation_tokens_total{engine="0",model_name="quick"}' in figures.text
