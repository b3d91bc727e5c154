"""Reasoning in chunks and answers of a chat, from events, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from bough.protocol.decision import RoundTimings
from bough.protocol.generation import (
    Beginning,
    Event,
    Finished,
    Function,
    ReasoningMarks,
    SpeculationMetrics,
    Started,
    Tokens,
    Tools,
    Usage,
)
from bough.protocol.sampling_params import PositionLogprobs, TokenLogprob
from orchestrator.http_api.answers.answer import Head
from orchestrator.http_api.body import parse
from orchestrator.http_api.chat import ChatAnswer
from orchestrator.http_api.fields.generation import ChatFields, StreamOptions
from orchestrator.http_api.responses.answer import ResponseAnswer, repeated
from orchestrator.http_api.responses.fields import ResponseFields, conversation
from orchestrator.tools.formats import HERMES

Json = dict[str, Any]

INSIDE, BEFORE = (ReasoningMarks("<think>", "</think>", one) for one in (Beginning.INSIDE, Beginning.BEFORE))
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
CALLED: Json = {"tools": Tools((Function("f", "{}"),))}
QUIET = StreamOptions()
LOGPROB = PositionLogprobs(TokenLogprob(0, -0.5), ())


def events(reasoning: ReasoningMarks | None, *rounds: list[str], rest: str = "") -> list[Event]:
    """Rounds of tokens with these texts, and the text that was held back."""
    tokens = [
        Tokens((0,) * len(said), (False,) * len(said), tuple(said), (LOGPROB,) * len(said), 1, 0, RoundTimings())
        for said in rounds
    ]
    usage, speculation = Usage(5, sum(map(len, rounds)), 0), SpeculationMetrics(1, 0, 0, 1.0, (1,), 0)
    end = Finished("stop", "", rest, usage, speculation, RoundTimings(), ())
    return [Started("r", 5, 1, "m", reasoning=reasoning), *tokens, end]


def answered(
    said: list[Event], telling: StreamOptions = QUIET, *, has_logprobs: bool = False, **how: Any
) -> tuple[Json, list[Json]]:
    """The whole answer, and the chunks of its stream."""
    how = {"tools": None, "formats": lambda _: HERMES} | how
    answer = ChatAnswer(Head("id", 1), 1, telling, (lambda _: lambda _: b"x") if has_logprobs else None, **how)
    chunks = [chunk for event in said for chunk in answer.chunks(0, event)]
    return answer.whole(), chunks


def joined(chunks: list[Json]) -> Json:
    """The message that a client puts together."""
    message: Json = {}
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks):
        for name in delta.keys() & {"content", "reasoning", "reasoning_content"}:
            message[name] = message.get(name, "") + delta[name]
    return message


HM = ["<thi", "nk>", "\nHm", ", so.", "\n</", "think>"]


@pytest.mark.parametrize(
    ("said", "reasoning", "content", "num_reasoning"),
    [
        (events(INSIDE, ["Hm", ", so."], ["\n", "</think>", "\n\nIt is", " 4."]), "Hm, so.", "It is 4.", 4),
        (events(BEFORE, HM, ["\n", "4"], rest="!"), "Hm, so.", "4!", 6),
        (events(INSIDE, ["Hm"], ["", " é"], rest=" </th"), "Hm é </th", None, 3),
        (events(BEFORE, ["\n", "It"], [" is"]), None, "\nIt is", 0),
        (events(BEFORE, []), None, "", 0),
        (events(INSIDE, ["</think>", "4"]), None, "4", 1),
        (events(INSIDE, ["</think>"]), None, "", 1),
    ],
)
def test_reasoning_is_a_separate_field_in_answers_and_streams(
    said: list[Event], reasoning: str | None, content: str | None, num_reasoning: int
) -> None:
    whole, chunks = answered(said, StreamOptions(continuous_usage_stats=True))
    fields = {"reasoning": reasoning, "reasoning_content": reasoning}
    assert whole["choices"][0]["message"] == {"role": "assistant", "refusal": None, "content": content} | fields
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}
    assert chunks[-1]["usage"] == whole["usage"]
    message = joined(chunks)
    assert message["content"] == (content or "")
    require_it_can_be_sent_back(whole)
    assert message.get("reasoning") == message.get("reasoning_content") == reasoning
    chat = pytest.importorskip("openai.types.chat", reason="extra `clients`")
    assert chat.ChatCompletion.model_validate(whole).choices[0].message.reasoning == reasoning
    for chunk in chunks:
        chat.ChatCompletionChunk.model_validate(chunk)


def test_reasoning_that_is_not_requested_is_left_out_and_counted() -> None:
    said = events(INSIDE, ["Hm", ", so."], ["</think>", "4"])
    whole, chunks = answered(said, has_reasoning=False, has_logprobs=True)
    assert whole["choices"][0]["message"] == {"role": "assistant", "refusal": None, "content": "4"}
    empty, _ = answered(events(INSIDE, ["Hm"]), has_reasoning=False)
    assert empty["choices"][0]["message"]["content"] == "", "null would be refused if it is sent back"
    require_it_can_be_sent_back(empty)
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert joined(chunks) == {"content": "4"}
    for choices in (
        [whole["choices"][0]],
        [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["logprobs"]],
    ):
        assert sum(len(choice["logprobs"]["content"]) for choice in choices) == 4, "of all tokens"


def require_it_can_be_sent_back(whole: Json) -> None:
    said = [{"role": "user", "content": "x"}, whole["choices"][0]["message"]]
    assert parse(ChatFields, json.dumps({"messages": said}).encode()).messages[1].role == "assistant"


def test_a_model_without_reasoning_is_unchanged() -> None:
    whole, chunks = answered(events(None, ["<think>", "Hm.</think>"]))
    assert whole["choices"][0]["message"] == {"role": "assistant", "refusal": None, "content": "<think>Hm.</think>"}
    assert "completion_tokens_details" not in whole["usage"]
    assert joined(chunks) == {"content": "<think>Hm.</think>"}


def test_calls_are_only_found_after_the_reasoning() -> None:
    whole, chunks = answered(events(INSIDE, [f"I could {CALL}", "\n</think>\n\n", f"Well.\n{CALL}"]), **CALLED)
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("Well.", f"I could {CALL}")
    assert joined(chunks)["reasoning"] == f"I could {CALL}"
    whole, _ = answered(events(INSIDE, [f"I could {CALL}"]), **CALLED)
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["message"]["content"] is None
    assert "tool_calls" not in whole["choices"][0]["message"]


def response_events(said: list[Event], **how: Any) -> list[Json]:
    """The events of a response's stream."""
    fields = parse(ResponseFields, b'{"input": "x"}')
    tools, spell = how.get("tools"), (lambda _: lambda _: b"x")
    answer = ResponseAnswer(Head("resp_1", 1), repeated(fields, tools), spell, tools, lambda _: HERMES)
    return [*(chunk for event in said for chunk in answer.chunks(0, event)), *answer.last_chunks()]


def test_reasoning_is_the_first_item_of_a_response() -> None:
    for calls in ({}, CALLED):
        said = events(BEFORE, ["<think>", "Hm", ", so."], [" ", "</think>", "\n\nIt", " is"], [" 4."])
        told = response_events(said, **calls)
        reasoning, message = told[-1]["response"]["output"]
        assert (reasoning["type"], reasoning["status"]) == ("reasoning", "completed")
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm, so."}]
        assert (message["type"], message["content"][0]["text"]) == ("message", "It is 4.")
        assert len(message["content"][0]["logprobs"]) == 3, "of its own tokens"
        assert told[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}
        deltas = [event["delta"] for event in told if event["type"] == "response.reasoning_text.delta"]
        assert "".join(deltas) == "Hm, so."
        indices = [event["output_index"] for event in told if "output_index" in event]
        assert indices == sorted(indices)
        require_openai_form(told)
    (cut,) = response_events(events(INSIDE, ["Hm"], rest=" <"))[-1]["response"]["output"]
    assert cut["content"][0]["text"] == "Hm <"
    reasoning, call = response_events(events(INSIDE, [f"Hm</think>{CALL}"]), **CALLED)[-1]["response"]["output"]
    assert (reasoning["content"][0]["text"], call["name"]) == ("Hm", "f")
    (plain,) = response_events(events(BEFORE, ["4", "."]))[-1]["response"]["output"]
    assert len(plain["content"][0]["logprobs"]) == 2


def require_openai_form(told: list[Json]) -> None:
    """Each event is, strictly, what OpenAI's package expects of its type."""
    responses = pytest.importorskip("openai.types.responses", reason="extra `clients`")
    adapter = TypeAdapter(responses.ResponseStreamEvent)
    for event in told:
        adapter.validate_python(event, strict=True)


def test_reasoning_items_belong_to_the_next_message_of_the_assistant() -> None:
    text = {"type": "reasoning_text", "text": "Hm"}
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [text]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = [{"role": "user", "content": "x"}, item, {"role": "assistant", "content": "4"}, item, call]
    asked = {"input": said, "reasoning": {"effort": "low"}, "chat_template_kwargs": {"a": 1}}
    prompt, _ = conversation(parse(ResponseFields, json.dumps(asked).encode()), None)
    assert [message.reasoning for message in prompt.messages] == ["", "Hm", "Hm"]
    assert prompt.messages[2].tool_calls
    assert json.loads(prompt.chat_template_kwargs) == {"reasoning_effort": "low", "a": 1}
