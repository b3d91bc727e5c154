"""/v1/chat/completions: from fields to requests, and from events to chunks and answers."""

from __future__ import annotations

from collections.abc import Iterator

from bough.protocol.generation import ChatPrompt, Event, Finished, Message, Started, Tokens
from bough.protocol.sampling_params import UNLIMITED
from orchestrator.http_api.answer import Answer, Head, StreamTelling
from orchestrator.http_api.errors import Json, invalid
from orchestrator.http_api.fields import ChatFields, MessageFields
from orchestrator.http_api.options import RequestLimits
from orchestrator.http_api.spelling import Spell, chat_logprobs

# Names of gRPC fields as clients of this API know them, for error messages.
FIELD_NAMES = {"chat.messages": "messages", "chat": "messages", "prompt": "messages", "logprobs": "top_logprobs"}


def chat_prompt(messages: list[MessageFields]) -> ChatPrompt:
    """The conversation as a prompt; OpenAI's role "developer" is "system" to chat templates."""
    return ChatPrompt(tuple(Message("system" if m.role == "developer" else m.role, m.content) for m in messages))


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
    return RequestLimits(UNLIMITED if most is None else most, (fields.top_logprobs or 0) if fields.logprobs else None)


class ChatAnswer(Answer):
    """An answer to a conversation."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, head: Head, num_choices: int, telling: StreamTelling, spell: Spell | None) -> None:
        super().__init__(head, num_choices, num_choices, telling, spell)
        self._logprobs: list[list[Json]] = [[] for _ in self.choices]

    def _told(self, index: int, event: Event) -> Iterator[Json]:
        match event:
            case Started():
                yield _delta(index, {"role": "assistant", "content": ""})
            case Tokens():
                logprobs = self._spelled(index, event)
                if event.text or logprobs or self.telling.continuous_usage:
                    yield _delta(index, {"content": event.text}, logprobs)
            case Finished():
                if event.text:
                    yield _delta(index, {"content": event.text})
                choice = self.choices[index]
                ending = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
                yield _delta(index, {}) | ending

    def _choice(self, index: int) -> Json:
        choice = self.choices[index]
        told = None if self._token_bytes is None else {"content": self._logprobs[index], "refusal": None}
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": told,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _spelled(self, index: int, event: Tokens) -> list[Json]:
        if self._token_bytes is None:
            return []
        spelled = chat_logprobs(event.logprobs, self._token_bytes)
        self._logprobs[index] += spelled
        return spelled


def _delta(index: int, delta: Json, logprobs: list[Json] | None = None) -> Json:
    told = {"content": logprobs, "refusal": None} if logprobs else None
    return {"index": index, "delta": delta, "logprobs": told, "finish_reason": None}
