"""/v1/chat/completions: from fields to requests, and from events to chunks and answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bough.protocol.generation import ChatPrompt, Event, Finished, Message, Started, Tokens, ToolCall, Tools
from bough.protocol.sampling_params import MAX_UINT32, UNLIMITED
from orchestrator.http_api.answers.answer import (
    AnswerContent,
    Completion,
    Formats,
    FunctionCall,
    Head,
    ReasoningText,
    Spell,
    chat_logprobs,
)
from orchestrator.http_api.fields.errors import Json, invalid
from orchestrator.http_api.fields.generation import ChatFields, MessageFields, StreamOptions
from orchestrator.http_api.fields.options import RequestLimits, response_constraint
from orchestrator.tools.call_parser import ArgumentsText, CallBegun, ContentText

# Names of gRPC fields in this API, for error messages.
FIELD_NAMES = {
    "chat.chat_template_kwargs": "chat_template_kwargs",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat": "messages",
    "prompt": "messages",
    "logprobs": "top_logprobs",
}


def chat_prompt(messages: Sequence[MessageFields], tools: Tools | None = None, template_kwargs: str = "") -> ChatPrompt:
    """The conversation as a prompt, OpenAI's role "developer" as "system". Raises ApiError naming the invalid field."""
    return ChatPrompt(tuple(_message(index, fields) for index, fields in enumerate(messages)), tools, template_kwargs)


def _message(index: int, fields: MessageFields) -> Message:
    calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in fields.tool_calls)
    left_out = f"be left out of the role {fields.role}"
    if calls and fields.role != "assistant":
        raise invalid(f"messages[{index}].tool_calls", [call.name for call in calls], left_out)
    if (fields.role == "tool") != bool(fields.tool_call_id):
        must = "be the id of the answered call" if fields.role == "tool" else left_out
        raise invalid(f"messages[{index}].tool_call_id", fields.tool_call_id, must)
    reasoning = (fields.reasoning or fields.reasoning_content) if fields.role == "assistant" else ""
    role = "system" if fields.role == "developer" else fields.role
    return Message(role, fields.content, calls, fields.tool_call_id, reasoning)


def chat_limits(fields: ChatFields) -> RequestLimits:
    """Limits of the request; by default the answer may fill the context. Raises ApiError naming the invalid field."""
    newer, older = fields.max_completion_tokens, fields.max_tokens
    if newer is not None and older is not None and newer != older:
        raise invalid("max_completion_tokens", newer, f"be equal to max_tokens, {older}, or be left out")
    if newer is not None and not 1 <= newer <= MAX_UINT32:  # the client's name for the field
        raise invalid("max_completion_tokens", newer, f"be 1 to {MAX_UINT32}")
    most = next((given for given in (newer, older) if given is not None), UNLIMITED)
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs", fields.top_logprobs, "be left out unless logprobs is true")
    logprobs = fields.top_logprobs if fields.logprobs else None
    return RequestLimits(most, logprobs, num_choices=fields.n, constraint=response_constraint(fields))


class ChatAnswer(Completion):
    """An answer to a conversation."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        head: Head,
        num_choices: int,
        stream_options: StreamOptions,
        spell: Spell | None,
        tools: Tools | None,
        formats: Formats,
        has_reasoning: bool = True,
    ) -> None:
        """Without `has_reasoning` the reasoning is left out."""
        super().__init__(head, num_choices, num_choices, stream_options, spell)
        self._logprobs: list[list[Json]] = [[] for _ in self.choices]
        self._tools, self._formats, self._has_reasoning = tools, formats, has_reasoning

    def _entries(self, index: int, event: Event) -> Iterator[Json]:
        match event:
            case Started():
                choice_id = f"{self.head.answer_id}/{index}"
                self.contents[index] = AnswerContent(choice_id, event, self._tools, self._formats)
                yield _delta(index, {"role": "assistant", "content": ""})
            case Tokens():
                logprobs = self._spelled(index, event)
                deltas = [*self._deltas(index, event.texts)]
                if not deltas and (logprobs or self.stream_options.continuous_usage_stats):
                    deltas = [{"content": ""}]
                for delta in deltas:
                    yield _delta(index, delta, logprobs)
                    logprobs = []
            case Finished():
                for delta in self._deltas(index, (event.text,), is_end=True):
                    yield _delta(index, delta)
                yield _delta(index, {}) | self._ending(index)

    def _deltas(self, index: int, texts: Sequence[str], *, is_end: bool = False) -> Iterator[Json]:
        """The fields that tokens' texts add to the message of a choice."""
        content = self.contents[index]
        for piece in content.pieces(texts, is_end=is_end):
            match piece:
                case ReasoningText(text) if self._has_reasoning:
                    yield _reasoning(text)
                case ContentText(text):
                    yield {"content": text}
                case CallBegun():
                    yield {"tool_calls": [{"index": len(content.calls) - 1} | _call(content.calls[-1])]}
                case ArgumentsText(text):
                    yield {"tool_calls": [{"index": len(content.calls) - 1, "function": {"arguments": text}}]}

    def _ending(self, index: int) -> Json:
        """The finish reason: "tool_calls" only if the choice ended by itself, after its last call."""
        is_call = self.choices[index].finish_reason == "stop" and self.contents[index].has_called
        return super()._ending(index) | ({"finish_reason": "tool_calls"} if is_call else {})

    def _choice(self, index: int) -> Json:
        content = self.contents[index]
        reasoning = "".join(content.reasoning) if self._has_reasoning else ""
        # Null only with fields that allow a message without content: clients send the message back unchanged.
        text = "".join(content.texts) or (None if content.calls or reasoning else "")
        message: Json = {"role": "assistant", "refusal": None, "content": text}
        if content.calls:
            message["tool_calls"] = [_call(call) for call in content.calls]
        if content.num_reasoning is not None and self._has_reasoning:
            message |= _reasoning(reasoning or None)
        entries = None if self._token_bytes is None else {"content": self._logprobs[index], "refusal": None}
        return {"index": index, "message": message, "logprobs": entries} | self._ending(index)

    def _spelled(self, index: int, event: Tokens) -> list[Json]:
        if self._token_bytes is None:
            return []
        spelled = chat_logprobs(event.logprobs, self._token_bytes)
        if not self.head.is_stream:
            self._logprobs[index] += spelled
        return spelled


def _delta(index: int, delta: Json, logprobs: list[Json] | None = None) -> Json:
    entries = {"content": logprobs, "refusal": None} if logprobs else None
    return {"index": index, "delta": delta, "logprobs": entries, "finish_reason": None}


def _call(call: FunctionCall) -> Json:
    """A call, complete or at its beginning."""
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reasoning(text: str | None) -> Json:
    """Reasoning under vLLM's current name, and under the older name that more clients read."""
    return {"reasoning": text, "reasoning_content": text}
