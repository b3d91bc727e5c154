"""Thoughts in chunks and answers of a chat, from events, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from bough.protocol.generation import Event, Finished, Function, SpeculationMetrics, Started, Tokens, Tools, Usage
from bough.protocol.messages import RoundTimings
from bough.protocol.sampling_params import PositionLogprobs, TokenLogprob
from bough.protocol.thoughts import Beginning, Thoughts
from orchestrator.http_api.answer import Head, StreamTelling
from orchestrator.http_api.chat import ChatAnswer
from orchestrator.tools.hermes import HERMES

Json = dict[str, Any]

INSIDE, BEFORE = (Thoughts("<think>", "</think>", one) for one in (Beginning.INSIDE, Beginning.BEFORE))
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
CALLED: Json = {"tools": Tools((Function("f", "{}"),)), "formats": lambda _: HERMES}
QUIET = StreamTelling()
LOGPROB = PositionLogprobs(TokenLogprob(0, -0.5), ())


def events(thoughts: Thoughts | None, *rounds: list[str], rest: str = "") -> list[Event]:
    """Rounds of tokens with these texts, and the text that was held back."""
    tokens = [
        Tokens((0,) * len(said), (False,) * len(said), tuple(said), (LOGPROB,) * len(said), 1, 0, RoundTimings())
        for said in rounds
    ]
    usage, speculation = Usage(5, sum(map(len, rounds)), 0), SpeculationMetrics(1, 0, 0, 1.0, (1,), 0)
    end = Finished("stop", "", rest, usage, speculation, RoundTimings(), ())
    return [Started("r", 5, 1, "m", thoughts=thoughts), *tokens, end]


def answered(
    said: list[Event], telling: StreamTelling = QUIET, *, has_logprobs: bool = False, **how: Any
) -> tuple[Json, list[Json]]:
    """The whole answer, and the chunks of its stream."""
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
    ("said", "reasoning", "content", "num_thought"),
    [
        (events(INSIDE, ["Hm", ", so."], ["\n", "</think>", "\n\nIt is", " 4."]), "Hm, so.", "It is 4.", 4),
        (events(BEFORE, HM, ["\n", "4"], rest="!"), "Hm, so.", "4!", 6),
        (events(INSIDE, ["Hm"], ["", " é"], rest=" </th"), "Hm é </th", None, 3),
        (events(BEFORE, ["\n", "It"], [" is"]), None, "\nIt is", 0),
        (events(BEFORE, []), None, "", 0),
        (events(INSIDE, ["</think>", "4"]), None, "4", 1),
        (events(INSIDE, ["</think>"]), None, None, 1),
    ],
)
def test_thoughts_are_a_field_of_their_own_whole_and_streamed(
    said: list[Event], reasoning: str | None, content: str | None, num_thought: int
) -> None:
    whole, chunks = answered(said, StreamTelling(continuous_usage=True))
    thoughts = {"reasoning": reasoning, "reasoning_content": reasoning}
    assert whole["choices"][0]["message"] == {"role": "assistant", "refusal": None, "content": content} | thoughts
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}
    assert chunks[-1]["usage"] == whole["usage"]
    message = joined(chunks)
    assert message["content"] == (content or "")
    assert message.get("reasoning") == message.get("reasoning_content") == reasoning


def test_without_thoughts_asked_for_they_are_left_out_and_counted() -> None:
    said = events(INSIDE, ["Hm", ", so."], ["</think>", "4"])
    whole, chunks = answered(said, has_reasoning=False, has_logprobs=True)
    assert whole["choices"][0]["message"] == {"role": "assistant", "refusal": None, "content": "4"}
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert joined(chunks) == {"content": "4"}
    for choices in (
        [whole["choices"][0]],
        [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["logprobs"]],
    ):
        assert sum(len(choice["logprobs"]["content"]) for choice in choices) == 4, "of all tokens"


def test_a_model_without_thoughts_answers_as_ever() -> None:
    whole, chunks = answered(events(None, ["<think>", "Hm.</think>"]))
    assert whole["choices"][0]["message"] == {"role": "assistant", "refusal": None, "content": "<think>Hm.</think>"}
    assert "completion_tokens_details" not in whole["usage"]
    assert joined(chunks) == {"content": "<think>Hm.</think>"}


def test_calls_are_looked_for_after_the_thoughts_alone() -> None:
    whole, chunks = answered(events(INSIDE, [f"I could {CALL}", "\n</think>\n\n", f"Well.\n{CALL}"]), **CALLED)
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("Well.", f"I could {CALL}")
    assert joined(chunks)["reasoning"] == f"I could {CALL}"
    thought, _ = answered(events(INSIDE, [f"I could {CALL}"]), **CALLED)
    assert thought["choices"][0]["finish_reason"] == "stop"
    assert thought["choices"][0]["message"]["content"] is None
    assert "tool_calls" not in thought["choices"][0]["message"]
