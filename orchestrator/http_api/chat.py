"""/v1/chat/completions: from fields to requests, and from events to chunks and answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bough.protocol.generation import ChatPrompt, Event, Finished, Message, Started, Tokens, Tools
from bough.protocol.sampling_params import UNLIMITED
from orchestrator.http_api.answer import Completion, Head, StreamTelling
from orchestrator.http_api.constraint import constraint_of
from orchestrator.http_api.errors import Json, invalid
from orchestrator.http_api.fields import ChatFields, MessageFields
from orchestrator.http_api.options import RequestLimits
from orchestrator.http_api.reasoning import ChoiceReasoning, reasoning_fields, reasoning_in, template_kwargs
from orchestrator.http_api.spelling import Spell, chat_logprobs
from orchestrator.http_api.tool_calls import ChoiceCalls, Formats, calls_in
from orchestrator.http_api.tool_fields import tool_call

# Names of gRPC fields as clients of this API know them, for error messages.
FIELD_NAMES = {
    "chat.chat_template_kwargs": "chat_template_kwargs",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat": "messages",
    "prompt": "messages",
    "logprobs": "top_logprobs",
}


def chat_prompt(
    messages: list[MessageFields],
    tools: Tools | None = None,
    variables: Mapping[str, Any] | None = None,
    effort: str | None = None,
) -> ChatPrompt:
    """The conversation as a prompt; OpenAI's role "developer" is "system" to chat templates.

    Raises:
        ApiError: names the invalid field.
    """
    said = tuple(_message(index, fields) for index, fields in enumerate(messages))
    return ChatPrompt(said, tools, template_kwargs(variables, effort))


def _message(index: int, fields: MessageFields) -> Message:
    calls, call_id = tuple(map(tool_call, fields.tool_calls or ())), fields.tool_call_id or ""
    if calls and fields.role != "assistant":
        raise invalid(f"messages[{index}].tool_calls", [call.name for call in calls], "be left out of such a role")
    if (fields.role == "tool") != bool(call_id):
        must = "be the id of the call that is answered" if fields.role == "tool" else "be left out of such a role"
        raise invalid(f"messages[{index}].tool_call_id", call_id, must)
    reasoning = (fields.reasoning or fields.reasoning_content or "") if fields.role == "assistant" else ""
    role = "system" if fields.role == "developer" else fields.role
    return Message(role, fields.content, calls, call_id, reasoning)


def chat_limits(fields: ChatFields) -> RequestLimits:
    """Limits of the request; by default the answer may fill the context, as at OpenAI.

    Raises:
        ApiError: names the invalid field.
    """
    newer, older = fields.max_completion_tokens, fields.max_tokens
    if newer is not None and older is not None and newer != older:
        raise invalid("max_completion_tokens", newer, f"be equal to max_tokens, {older}, or one of them left out")
    most = newer if newer is not None else older
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs", fields.top_logprobs, "be left out unless logprobs is true")
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    most = UNLIMITED if most is None else most
    return RequestLimits(most, logprobs, num_choices=fields.n, constraint=constraint_of(fields))


class ChatAnswer(Completion):
    """An answer to a conversation."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        head: Head,
        num_choices: int,
        telling: StreamTelling,
        spell: Spell | None,
        tools: Tools | None,
        formats: Formats,
        has_reasoning: bool = True,
    ) -> None:
        """Without `has_reasoning` thoughts are left out."""
        super().__init__(head, num_choices, num_choices, telling, spell)
        self._logprobs: list[list[Json]] = [[] for _ in self.choices]
        self._tools, self._formats = tools, formats
        self._calls: dict[int, ChoiceCalls | None] = {}  # by choice
        self._has_reasoning = has_reasoning
        self._reasoning: dict[int, ChoiceReasoning | None] = {}  # by choice

    def _told(self, index: int, event: Event) -> Iterator[Json]:
        match event:
            case Started():
                choice_id = f"{self.head.answer_id}/{index}"
                calls = calls_in(choice_id, self._tools, self._formats, event.model_name)
                self._calls[index] = calls
                self._reasoning[index] = reasoning_in(event.thoughts, has_calls=calls is not None)
                yield _delta(index, {"role": "assistant", "content": ""})
            case Tokens():
                logprobs = self._spelled(index, event)
                deltas = [*self._deltas(index, event.texts)]
                if not deltas and (logprobs or self.telling.continuous_usage):
                    deltas = [{"content": ""}]
                for delta in deltas:
                    yield _delta(index, delta, logprobs)
                    logprobs = []
            case Finished():
                for delta in self._deltas(index, (event.text,), is_end=True):
                    yield _delta(index, delta)
                yield _delta(index, {}) | self._ending(index)

    def _deltas(self, index: int, texts: Sequence[str], *, is_end: bool = False) -> Iterator[Json]:
        """What the texts of tokens add to the message of a choice."""
        text, reasoning = "".join(texts), self._reasoning.get(index)
        if reasoning is not None:
            thoughts, text = reasoning.part(texts, is_end=is_end)
            self.choices[index].reasoning_tokens = reasoning.num_tokens
            if thoughts and self._has_reasoning:
                yield reasoning_fields(thoughts)
        calls = self._calls.get(index)
        if calls is not None:
            yield from calls.deltas(text, is_end=is_end)
        elif text:
            yield {"content": text}

    def _ending(self, index: int) -> Json:
        """Why a choice ended: by calls only if it ended by itself, and with the last of them."""
        choice, calls = self.choices[index], self._calls.get(index)
        is_call = choice.finish_reason == "stop" and calls is not None and calls.is_whole
        reason = "tool_calls" if is_call else choice.finish_reason
        return {"finish_reason": reason, "stop_reason": choice.stop_reason}

    def _choice(self, index: int) -> Json:
        choice = self.choices[index]
        told = None if self._token_bytes is None else {"content": self._logprobs[index], "refusal": None}
        calls, reasoning = self._calls.get(index), self._reasoning.get(index)
        said: Json = {"content": choice.text} if calls is None else calls.message()
        if reasoning is not None:
            content = reasoning.content if calls is None else said["content"]
            said["content"] = content or (None if reasoning.parser.has_thoughts else content)
            said |= reasoning_fields(reasoning.thoughts or None) if self._has_reasoning else {}
        message = {"role": "assistant", "refusal": None} | said
        return {"index": index, "message": message, "logprobs": told} | self._ending(index)

    def _spelled(self, index: int, event: Tokens) -> list[Json]:
        if self._token_bytes is None:
            return []
        spelled = chat_logprobs(event.logprobs, self._token_bytes)
        self._logprobs[index] += spelled
        return spelled


def _delta(index: int, delta: Json, logprobs: list[Json] | None = None) -> Json:
    told = {"content": logprobs, "refusal": None} if logprobs else None
    return {"index": index, "delta": delta, "logprobs": told, "finish_reason": None}
