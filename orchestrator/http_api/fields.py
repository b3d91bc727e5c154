"""What a request's fields may be: types and names only. Ranges are checked by whoever checks them for gRPC too."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt
from pydantic_core import PydanticCustomError

TextOrTokens = str | tuple[int, ...]


def _must(text: str) -> PydanticCustomError:
    return PydanticCustomError("must", "{text}", {"text": text})


def _texts(value: Any) -> Any:
    """One text or a list of them."""
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return ()
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _must("be a text or a list of texts")
    return tuple(texts)


def _prompts(value: Any) -> Any:
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_tokens(value)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise _must("be a text, a list of token ids, or a list of either")
    if not all(isinstance(one, str) or (isinstance(one, list) and _is_tokens(one)) for one in value):
        raise _must("be a text, a list of token ids, or a list of either")
    return tuple(one if isinstance(one, str) else tuple(one) for one in value)


def _is_tokens(value: list[Any]) -> bool:
    return all(type(one) is int and one >= 0 for one in value)


def _content(value: Any) -> Any:
    """A text, or a list of parts that are text, which stand one after another as they are."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _must("be a text or a list of parts of type text")
    for part in value:
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text"):
            raise _must("have parts of type text only: this model reads nothing else")
        if not isinstance(part.get("text"), str):
            raise _must("have a text in each part")
    return "".join(part["text"] for part in value)


def _nothing(value: Any) -> Any:
    """A field that would change the answer, and that nothing is done about: only its empty values pass."""
    if value not in (None, [], {}, ""):
        raise _must("be left out: it is not supported")
    return None


def _tool_choice(value: Any) -> Any:
    return _nothing(None if value in ("none", "auto") else value)


def _response_format(value: Any) -> Any:
    return _nothing(None if value == {"type": "text"} else value)


def _modalities(value: Any) -> Any:
    return _nothing(None if value == ["text"] else value)


def _one(value: Any) -> Any:
    return _nothing(None if type(value) is int and value == 1 else value)


def _speculation(value: Any) -> Any:
    """`true` and `false` are short for an object that says no more."""
    return {"enabled": value} if isinstance(value, bool) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
Refused = Annotated[None, BeforeValidator(_nothing)]
Ignored = Any


class _Fields(BaseModel):
    """A misspelt field is refused by its name: it would otherwise change nothing, in silence."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(_Fields):
    """What a stream tells beside its text."""

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None
    include_obfuscation: Ignored = None


class SpeculationFields(_Fields):
    """How to speculate, which changes the speed and not the answer."""

    enabled: StrictBool | None = None
    budget: StrictInt | None = None
    width: StrictInt | None = None
    depth: StrictInt | None = None
    lookup: StrictInt | None = None


class GenerationFields(_Fields):
    """What both ways to generate have in common."""

    model: str | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: StrictInt | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: StrictInt | None = None
    seed: StrictInt | None = None
    stop: Texts = ()
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # What bough adds.
    top_k: StrictInt | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: StrictBool | None = None
    stop_token_ids: list[StrictInt] | None = None
    session_id: str | None = None
    speculation: Annotated[SpeculationFields | None, BeforeValidator(_speculation)] = None
    # Accepted, and of no consequence for the answer.
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    parallel_tool_calls: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    verbosity: Ignored = None
    reasoning_effort: Ignored = None
    prediction: Ignored = None


class MessageFields(_Fields):
    """One message of a conversation; the rest is what OpenAI's clients send back of an answer."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]
    name: Ignored = None
    refusal: Ignored = None
    annotations: Ignored = None
    reasoning_content: Ignored = None
    audio: Refused = None
    tool_calls: Refused = None
    function_call: Refused = None


class ChatFields(GenerationFields):
    """Body of /v1/chat/completions."""

    messages: list[MessageFields] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    response_format: Annotated[None, BeforeValidator(_response_format)] = None
    tools: Refused = None
    tool_choice: Annotated[None, BeforeValidator(_tool_choice)] = None
    functions: Refused = None
    function_call: Annotated[None, BeforeValidator(_tool_choice)] = None
    modalities: Annotated[None, BeforeValidator(_modalities)] = None
    audio: Refused = None
    web_search_options: Refused = None


class CompletionFields(GenerationFields):
    """Body of /v1/completions."""

    prompt: Annotated[tuple[TextOrTokens, ...], BeforeValidator(_prompts)]
    logprobs: StrictInt | None = None
    echo: StrictBool | None = None
    best_of: Annotated[None, BeforeValidator(_one)] = None
    suffix: Refused = None


class TokenizeFields(_Fields):
    """Body of /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageFields] | None = Field(None, min_length=1)
    return_token_strs: StrictBool | None = None


class DetokenizeFields(_Fields):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[StrictInt]
