"""Types and names of request fields. Ranges are checked by the same code as for gRPC."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    StrictBool,
    StrictInt,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema

from bough.config.json_fields import must
from bough.protocol.codec import MAX_NAME_LENGTH
from bough.protocol.generation import GenerateOptions
from bough.protocol.sampling_params import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_GRAMMAR,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_UINT32,
    PARAMETERS,
)
from bough.tokenization.chat_template import RESERVED
from orchestrator.http_api.fields.base import Fields, Neutral, field_error
from orchestrator.http_api.fields.tools import ANY, CallList, ToolChoiceField, ToolList

MAX_BIAS = 1000  # of logits
MAX_EFFORT = 32  # characters of `reasoning_effort`, whose values depend on the template
MAX_REQUEST_ID = 128  # characters of a request's id, without the answer's prefix
# For each type of part, the key of its text; only an assistant has refusals.
_SAID = {"text": "text", "input_text": "text", "refusal": "refusal"}
TextOrTokens = str | tuple[int, ...]
AS_RENDERED: Neutral = {"add_generation_prompt": (True,), "continue_final_message": (False,)}


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)]


def _stops(value: Any) -> Any:
    """Accept one text or a list of texts."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(isinstance(text, str) for text in texts):
        raise must(f"be a text or a list of at most {MAX_STOPS} texts")
    return tuple(texts)


Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Prompts = Text | Annotated[list[Text | Tokens], Field(min_length=1)] | Tokens


def _prompts(value: Any) -> Any:
    """Accept a text, a list of texts, a list of token ids, or a list of such lists."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_tokens(value)):
        value = [value]
    prompts = value if isinstance(value, list) else []
    if not prompts or not all(isinstance(one, str) or (isinstance(one, list) and _is_tokens(one)) for one in prompts):
        raise must("be a text, a list of token ids, or a list of either")
    return tuple(one if isinstance(one, str) else tuple(one) for one in value)


def _is_tokens(value: list[Any]) -> bool:
    return all(type(one) is int and one >= 0 for one in value)


def part_schema(keys: Mapping[str, str]) -> dict[str, Any]:
    """The JSON Schema of the values that `parts_text` accepts."""
    kinds = [
        {"type": "object", "properties": {"type": {"const": kind}, key: {"type": "string"}}, "required": ["type", key]}
        for kind, key in keys.items()
    ]
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": kinds}}]}


def parts_text(value: Any, keys: Mapping[str, str]) -> Any:
    """Accept a text, or a list of parts whose texts are joined; `keys` has each type's key of the text."""
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


def _speculation(value: Any) -> Any:
    """Accept `true` or `false` as short for an object with only `enabled`."""
    return {"enabled": value} if isinstance(value, bool) else value


SchemaText = dict[str, Any] | Annotated[str, Field(max_length=MAX_GRAMMAR)]


def schema_text(value: Any) -> Any:
    """Accept a JSON Schema as an object, or as the text of one, of a size that a grammar may have."""
    if not isinstance(value, dict | str):
        raise must("be a JSON Schema, or the text of one")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > MAX_GRAMMAR:
        raise must(f"be at most {MAX_GRAMMAR} characters")
    return text


# What is checked later, by the same code as for gRPC, is here only described.
Name = Annotated[str, WithJsonSchema({"type": "string", "maxLength": MAX_NAME_LENGTH})]
TokenId = Annotated[StrictInt, WithJsonSchema({"type": "integer", "minimum": 0, "maximum": MAX_UINT32})]
Size = Annotated[StrictInt, WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_UINT32})]
BIASES_SCHEMA: dict[str, Any] = {
    "type": "object",
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    "maxProperties": MAX_BIASES,
}
VARIABLES_SCHEMA: dict[str, Any] = {
    "type": "object",
    "propertyNames": {"pattern": "^[A-Za-z][A-Za-z0-9_]{0,63}$", "not": {"enum": sorted(RESERVED)}},
    "additionalProperties": {"$ref": "#/components/schemas/TemplateVariable"},
}
Variables = Annotated[dict[str, Any], WithJsonSchema(VARIABLES_SCHEMA)]

Schema = Annotated[str, BeforeValidator(schema_text, json_schema_input_type=SchemaText)]
Effort = Annotated[str, Field(min_length=1, max_length=MAX_EFFORT)]


class StreamOptions(Fields):
    """Additional reports of a stream."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_rounds: StrictBool = False
    ignored = frozenset({"include_obfuscation"})


class SpeculationFields(Fields):
    """Speculation settings, which change the speed but not the answer."""

    enabled: StrictBool = True
    budget: Size | None = None
    width: Size | None = None
    depth: Size | None = None
    lookup: TokenId | None = None


class JsonSchemaFields(Fields):
    """A JSON Schema that the answer follows. It always does, whether `strict` or not."""

    ignored = frozenset({"name", "description", "strict"})
    json_schema: Schema = Field("{}", alias="schema")


class ResponseFormatFields(Fields):
    """The answer's format, in OpenAI's form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFields | None = None

    @model_validator(mode="after")
    def _require_schema(self) -> ResponseFormatFields:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise must("have a json_schema if its type is that, and none otherwise")
        return self


class StructuredOutputsFields(Fields):
    """The answer's constraint, in vLLM's form: exactly one of these."""

    json_schema: Schema | None = Field(None, alias="json")
    json_object: StrictBool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    grammar: str | None = None


# Other servers' names of constraints (older vLLM, SGLang), and the names in `StructuredOutputs`.
FORMS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}


_DEFAULTS = GenerateOptions()
# Sampling parameters that are numbers and the same on all paths; a seed may be negative here.
SAMPLED = tuple(name for name in PARAMETERS if name not in ("seed", "logprobs"))
if TYPE_CHECKING:
    SamplingFields = Fields
else:
    SamplingFields = create_model(
        "SamplingFields",
        __base__=Fields,
        **{
            name: (PARAMETERS[name].kind, Field(getattr(_DEFAULTS, name), description=PARAMETERS[name].help))
            for name in SAMPLED
        },
    )


class RequestFields(SamplingFields):
    """Fields common to all that generate."""

    model: Name = ""
    stream: StrictBool = False
    # Bough's extensions; for responses also those of chat.
    seed: StrictInt | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops, json_schema_input_type=Stops)] = ()
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES), WithJsonSchema(BIASES_SCHEMA)] = Field(
        default_factory=dict
    )
    ignore_eos: StrictBool = False
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_STOP_TOKENS)
    include_stop_str_in_output: StrictBool = False
    session_id: Name = ""
    cache_salt: Name = ""
    structured_outputs: StructuredOutputsFields | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    request_id: Annotated[str, Field(max_length=MAX_REQUEST_ID)] = ""
    speculation: Annotated[
        SpeculationFields, BeforeValidator(_speculation, json_schema_input_type=bool | SpeculationFields)
    ] = SpeculationFields()
    ignored = frozenset(
        {"store", "service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
         "safety_identifier", "guided_decoding_backend"}
    )  # fmt: skip
    neutral: ClassVar[Neutral] = {
        "priority": (0,),
        "skip_special_tokens": (True,),
        "moderation": (),
        "separate_reasoning": (True,),
        "stream_reasoning": (True,),
    }

    @model_validator(mode="after")
    def _require_one_form(self) -> RequestFields:
        first, *more = [name for name in (*FORMS, "structured_outputs") if getattr(self, name) is not None] or [""]
        if more:
            raise field_error(more[0], getattr(self, more[0]), must(f"be left out with {first}"))
        return self

    @property
    def form(self) -> tuple[str, StructuredOutputsFields | None]:
        """The answer's constraint and the field that has it, if it is in a field that OpenAI's API lacks."""
        for name, ours in FORMS.items():
            if (value := getattr(self, name)) is not None:
                return name, StructuredOutputsFields.model_validate({ours: value})
        return "structured_outputs", self.structured_outputs


class GenerationFields(RequestFields):
    """Fields common to chat and text completions."""

    stream_options: StreamOptions = StreamOptions()
    max_tokens: StrictInt | None = None
    n: StrictInt = 1
    response_format: ResponseFormatFields = ResponseFormatFields(type="text")
    ignored = RequestFields.ignored | {"user", "metadata", "spaces_between_special_tokens", "verbosity", "prediction"}
    neutral: ClassVar[Neutral] = RequestFields.neutral | {  # the default of vLLM's clients
        "bad_words": ([],),
        "length_penalty": (1,),
        "prompt_logprobs": (0,),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "use_beam_search": (False,),
    }


class MessageFields(Fields):
    """One message of a conversation; ignores fields of answers that OpenAI's clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: CallList = Field(default_factory=list)
    tool_call_id: str = ""
    content: Annotated[str, BeforeValidator(partial(parts_text, keys=_SAID)), WithJsonSchema(part_schema(_SAID))]
    reasoning: str = ""  # an assistant's reasoning, as current clients send it back
    reasoning_content: str = ""  # the same, by older clients
    ignored = frozenset({"name", "refusal", "annotations", "reasoning_details", "thinking_blocks"})
    neutral: ClassVar[Neutral] = {"function_call": (), "audio": ()}

    @classmethod
    def _kept(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Drop fields without effect, as `Fields._kept`; an assistant's message without content may get one.

        That is the refusal, or an empty text with calls or reasoning.
        """
        given = super()._kept(data)
        if "content" in given:
            return given
        refusal, is_assistant = data.get("refusal"), data.get("role") == "assistant"
        has_more = any(data.get(name) for name in ("tool_calls", "reasoning", "reasoning_content"))
        if is_assistant and (refusal is not None or has_more):
            return given | {"content": "" if refusal is None else refusal}
        return given | {"content": None} if "content" in data else given

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema, in which the role decides what a message must have."""
        reference = super().__get_pydantic_json_schema__(core_schema, handler)
        schema = handler.resolve_ref_schema(reference)
        schema["required"] = ["role"]
        schema["properties"]["content"] = {"anyOf": [part_schema(_SAID), {"type": "null"}]}
        schema["anyOf"] = _MESSAGES
        return reference


def _message(roles: list[str], required: list[str], **fields: Any) -> dict[str, Any]:
    return {"properties": {"role": {"enum": roles}, **fields}, "required": required}


_NO_CALLS: dict[str, Any] = {"tool_calls": {"enum": [[], None]}}
_NO_CALL_ID: dict[str, Any] = {"tool_call_id": {"enum": ["", None]}}
_NOTHING: dict[str, Any] = {"content": {"type": "null"}, "refusal": {"type": "null"}}
_SOME: dict[str, Any] = {"type": "string", "minLength": 1}
_MESSAGES = [
    _message(["system", "developer", "user"], ["content"], content=part_schema(_SAID), **_NO_CALLS, **_NO_CALL_ID),
    _message(["tool"], ["content", "tool_call_id"], content=part_schema(_SAID), tool_call_id=_SOME, **_NO_CALLS),
    _message(["assistant"], ["content"], content=part_schema(_SAID), **_NO_CALL_ID),
    _message(["assistant"], ["refusal"], refusal=part_schema(_SAID), content={"type": "null"}, **_NO_CALL_ID),
    _message(["assistant"], ["tool_calls"], tool_calls={"type": "array", "minItems": 1}, **_NOTHING, **_NO_CALL_ID),
    _message(["assistant"], ["reasoning"], reasoning=_SOME, **_NOTHING, **_NO_CALL_ID),
    _message(["assistant"], ["reasoning_content"], reasoning_content=_SOME, **_NOTHING, **_NO_CALL_ID),
]


class ChatFields(GenerationFields):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[MessageFields], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool = False
    top_logprobs: StrictInt = 0
    tools: ToolList = Field(default_factory=list)
    tool_choice: ToolChoiceField = ANY
    parallel_tool_calls: StrictBool = True
    include_reasoning: StrictBool = True
    chat_template_kwargs: Variables = Field(default_factory=dict)
    reasoning_effort: Effort | None = None
    neutral: ClassVar[Neutral] = {
        **GenerationFields.neutral,
        **AS_RENDERED,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "echo": (False,),
        "add_special_tokens": (False,),  # the template has them
    }


class CompletionFields(GenerationFields):
    """Body of /v1/completions."""

    prompt: Annotated[tuple[TextOrTokens, ...], BeforeValidator(_prompts, json_schema_input_type=Prompts)]
    logprobs: StrictInt | None = None
    echo: StrictBool = False
    ignored = GenerationFields.ignored | {"parallel_tool_calls", "reasoning_effort"}
    neutral: ClassVar[Neutral] = GenerationFields.neutral | {
        "add_special_tokens": (True,),
        "best_of": (1,),
        "suffix": ("",),
    }


class TokenizeFields(Fields):
    """Body of /tokenize: a text or a conversation."""

    model: Name = ""
    prompt: Annotated[str, WithJsonSchema({"type": "string", "minLength": 1})] | None = None
    messages: Annotated[list[MessageFields], Field(fail_fast=True)] | None = Field(None, min_length=1)
    return_token_strs: StrictBool = False
    add_special_tokens: StrictBool | None = None
    chat_template_kwargs: Variables = Field(default_factory=dict)
    tools: ToolList = Field(default_factory=list)
    neutral: ClassVar[Neutral] = AS_RENDERED


class DetokenizeFields(Fields):
    """Body of /detokenize."""

    model: Name = ""
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
