"""Types and names of request fields. Ranges are checked by the same code as for gRPC."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, model_validator

from bough.config.json_fields import must
from bough.protocol.sampling_params import MAX_CHOICES
from orchestrator.http_api.base_fields import Fields, Ignored
from orchestrator.http_api.tool_fields import CallList, ToolChoiceField, ToolList
from orchestrator.http_api.unsupported import OnlyTrue, Unsupported

MAX_EFFORT = 32  # characters of `reasoning_effort`, of which templates know different ones
MAX_REQUEST_ID = 128  # characters of a request's id, before those that make it the answer's
TextOrTokens = str | tuple[int, ...]


def _texts(value: Any) -> Any:
    """Accept one text or a list of texts."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise must("be a text or a list of texts")
    return tuple(texts)


def _prompts(value: Any) -> Any:
    """Accept a text, a list of texts, a list of token ids, or a list of such lists."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_tokens(value)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise must("be a text, a list of token ids, or a list of either")
    if not all(isinstance(one, str) or (isinstance(one, list) and _is_tokens(one)) for one in value):
        raise must("be a text, a list of token ids, or a list of either")
    return tuple(one if isinstance(one, str) else tuple(one) for one in value)


def _is_tokens(value: list[Any]) -> bool:
    return all(type(one) is int and one >= 0 for one in value)


def parts_text(value: Any, keys: Mapping[str, str]) -> Any:
    """Accept a text, or a list of parts whose texts are concatenated; `keys` has the key of its text for each type."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise must(f"be a text or a list of parts of type {next(iter(keys))}")
    for part in value:
        if not isinstance(part, dict) or part.get("type") not in tuple(keys):
            raise must(f"have parts of type {' or '.join(keys)} only: this model reads nothing else")
        if not isinstance(part.get(keys[part["type"]]), str):
            raise must("have a text in each part")
    return "".join(part[keys[part["type"]]] for part in value)


def _content(value: Any) -> Any:
    return parts_text(value, {"text": "text", "input_text": "text"})


def _speculation(value: Any) -> Any:
    """Accept `true` or `false` as short for an object with only `enabled`."""
    return {"enabled": value} if isinstance(value, bool) else value


def schema_text(value: Any) -> Any:
    """Accept a JSON Schema as an object, or as the text of one."""
    if not isinstance(value, dict | str):
        raise must("be a JSON Schema, or the text of one")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


Effort = Annotated[str, Field(min_length=1, max_length=MAX_EFFORT)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]


class StreamOptions(Fields):
    """What a stream reports besides its text."""

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None
    include_rounds: StrictBool | None = None
    include_obfuscation: Ignored = None


class SpeculationFields(Fields):
    """Speculation settings, which change the speed and not the answer."""

    enabled: StrictBool | None = None
    budget: StrictInt | None = None
    width: StrictInt | None = None
    depth: StrictInt | None = None
    lookup: StrictInt | None = None


class JsonSchemaFields(Fields):
    """A JSON Schema that the answer follows. It always does, whether `strict` or not."""

    name: Ignored = None
    description: Ignored = None
    strict: Ignored = None
    json_schema: Annotated[str, BeforeValidator(schema_text)] = Field("{}", alias="schema")


class ResponseFormatFields(Fields):
    """What the answer must be, as OpenAI's clients say it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFields | None = None


class StructuredOutputsFields(Fields):
    """What the answer must be, as vLLM's clients say it: exactly one of these."""

    json_schema: Annotated[str | None, BeforeValidator(schema_text)] = Field(None, alias="json")
    json_object: StrictBool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    grammar: str | None = None


class RequestFields(Fields):
    """Fields common to all that generate."""

    model: str | None = None
    stream: StrictBool | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Extensions by bough, in responses also those of chat.
    seed: StrictInt | None = None
    stop: Texts = ()
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: StrictInt | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: StrictBool | None = None
    stop_token_ids: list[StrictInt] | None = None
    min_tokens: StrictInt | None = None
    include_stop_str_in_output: StrictBool | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputsFields | None = None
    request_id: Annotated[str, Field(max_length=MAX_REQUEST_ID)] | None = None
    speculation: Annotated[SpeculationFields | None, BeforeValidator(_speculation)] = None
    # vLLM's fields that clients send by default.
    priority: Unsupported = None
    skip_special_tokens: Unsupported = None
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None


class GenerationFields(RequestFields):
    """Fields common to chat and text completions."""

    stream_options: StreamOptions | None = None
    max_tokens: StrictInt | None = None
    n: StrictInt | None = None
    response_format: ResponseFormatFields | None = None
    # vLLM's fields that clients send by default.
    bad_words: Unsupported = None
    length_penalty: Unsupported = None
    prompt_logprobs: Unsupported = None
    return_token_ids: Unsupported = None
    return_tokens_as_token_ids: Unsupported = None
    spaces_between_special_tokens: Ignored = None
    use_beam_search: Unsupported = None
    parallel_tool_calls: Ignored = None
    verbosity: Ignored = None
    reasoning_effort: Ignored = None
    prediction: Ignored = None


class MessageFields(Fields):
    """One message of a conversation; ignored fields are those of answers that OpenAI's clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: CallList | None = None
    tool_call_id: str | None = None
    function_call: Unsupported = None
    content: Annotated[str, BeforeValidator(_content)]
    name: Ignored = None
    refusal: Ignored = None
    annotations: Ignored = None
    reasoning: str | None = None  # as current clients send back what an assistant thought
    reasoning_content: str | None = None  # as older ones do
    audio: Unsupported = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """Drop nulls but of the content, which is empty beside calls or thoughts; a refusal, as OpenAI's, was said."""
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        if (
            data.get("content") is None
            and data.get("role") == "assistant"
            and (
                "refusal" in given or any(given.get(name) for name in ("tool_calls", "reasoning", "reasoning_content"))
            )
        ):
            return given | {"content": given.get("refusal", "")}
        return given | {"content": data["content"]} if "content" in data else given


class ChatFields(GenerationFields):
    """Body of /v1/chat/completions."""

    messages: list[MessageFields] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    tools: ToolList | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: StrictBool | None = None
    functions: Unsupported = None
    function_call: Unsupported = None
    modalities: Unsupported = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    echo: Unsupported = None
    include_reasoning: StrictBool | None = None
    add_special_tokens: Unsupported = None
    add_generation_prompt: Unsupported = None
    continue_final_message: Unsupported = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None


class CompletionFields(GenerationFields):
    """Body of /v1/completions."""

    prompt: Annotated[tuple[TextOrTokens, ...], BeforeValidator(_prompts)]
    logprobs: StrictInt | None = None
    echo: StrictBool | None = None
    add_special_tokens: OnlyTrue = None
    best_of: Unsupported = None
    suffix: Unsupported = None


class TokenizeFields(Fields):
    """Body of /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageFields] | None = Field(None, min_length=1)
    return_token_strs: StrictBool | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: Unsupported = None
    continue_final_message: Unsupported = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ToolList | None = None


class DetokenizeFields(Fields):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[StrictInt]
