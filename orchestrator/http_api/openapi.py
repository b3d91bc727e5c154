"""The document at /openapi.json: requests as in `fields`, answers as `answers` and `responses` write them."""

from __future__ import annotations

from functools import lru_cache

from pydantic.json_schema import models_json_schema

from bough import __version__
from bough.protocol.codec import MAX_NAME_LENGTH
from bough.protocol.sampling_params import MAX_LOGPROBS, MAX_SEED, MAX_UINT32, PARAMETERS
from bough.tokenization.chat_template import MAX_NUMBER
from orchestrator.http_api.fields.base import Fields
from orchestrator.http_api.fields.generation import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from orchestrator.http_api.fields.options import LOWEST_SEED, MAX_CHOICES
from orchestrator.http_api.responses.fields import ResponseFields
from orchestrator.http_api.schema_rules import NULL, RULES, Schema

BODIES: tuple[type[Fields], ...] = (ChatFields, CompletionFields, ResponseFields, TokenizeFields, DetokenizeFields)
REFERENCES = "#/components/schemas/"
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
ANYTHING: Schema = {"type": "object"}
RANGES: dict[str, Schema] = {  # ranges of numbers, which are checked by the same code as for gRPC
    **{name: parameter.schema for name, parameter in PARAMETERS.items()},
    "top_k": {"minimum": -1, "maximum": MAX_UINT32},
    "seed": {"minimum": LOWEST_SEED, "maximum": MAX_SEED},
    "max_tokens": {"minimum": 0, "maximum": MAX_UINT32},
    "max_completion_tokens": {"minimum": 1, "maximum": MAX_UINT32},
    "max_output_tokens": {"minimum": 1, "maximum": MAX_UINT32},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
}
REFUSALS = {  # statuses of errors, with their causes
    400: "a field that cannot be used, no JSON object, or a prompt that does not fit the context",
    401: "no valid key",
    404: "no such path or model",
    405: "a method that the path does not have",
    408: "the body took too long",
    409: "a request of the session, or with this id, is running, or another request has taken over the session",
    413: "a body that is too large",
    415: "a body without the content type JSON",
    421: "a foreign host name",
    429: "too many requests; `retry-after` says when to try again",
    500: "a fault of bough",
    503: "no target answers, or the orchestrator is ending",
    504: "the request took too long",
}


@lru_cache(maxsize=1)
def document() -> Schema:
    """The OpenAPI 3.1 document."""
    _, defined = models_json_schema([(kind, "validation") for kind in BODIES], ref_template=REFERENCES + "{model}")
    for body in BODIES:
        for name, values in RANGES.items():
            for kind in defined["$defs"][body.__name__]["properties"].get(name, {}).get("anyOf", ()):
                kind.update(values if kind["type"] in ("number", "integer") else {})
    for name, rules in RULES.items():
        defined["$defs"][name]["allOf"] = rules
    bearer = {"type": "http", "scheme": "bearer", "description": "a key, if the orchestrator has --keys"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "bough", "version": __version__, "description": "OpenAI's API, and what operators need"},
        "paths": _paths(),
        "security": [{}, {"key": []}],
        "components": {"schemas": defined["$defs"] | ANSWERS, "securitySchemes": {"key": bearer}},
    }


def _paths() -> Schema:
    name = TEXT | {"maxLength": MAX_NAME_LENGTH}
    session = _parameter("x-session-id", "header", "the session, as `session_id` of the body", name)
    stream, responses = "chunks of type ChatCompletionChunk", "events of type ResponseEvent"
    return {
        "/v1/chat/completions": _post("The assistant's next message", ChatFields, "ChatCompletion", stream, session),
        "/v1/responses": _post(
            "The same in the form of OpenAI's Responses API", ResponseFields, "Response", responses, session
        ),
        "/v1/completions": _post(
            "Continuations of one or several texts",
            CompletionFields,
            "Completion",
            "chunks of type Completion",
            session,
        ),
        "/v1/models": _get("The served models", _ref("Models")),
        "/v1/models/{model}": _get("A model", _ref("Model"), "model"),
        "/tokenize": _post("The tokens of a text or a conversation", TokenizeFields, "Tokenized"),
        "/detokenize": _post("The text of tokens", DetokenizeFields, "Detokenized"),
        "/health": _get("Whether requests can be served", _object(status={"const": "ok"})),
        "/version": _get("The release", _object(version=TEXT)),
        "/cluster": _get("This orchestrator and its workers", ANYTHING),
        "/decisions/{name}": _get("The last rounds of a request or session", _list(ANYTHING), "name"),
        "/metrics": _get("Metrics for Prometheus", TEXT, media_type="text/plain"),
        "/service-discovery": _get("Addresses of all metrics, for Prometheus", _list(ANYTHING)),
        "/openapi.json": _get("This document", ANYTHING),
    }


def _post(summary: str, body: type[Fields], answer: str, stream: str = "", *parameters: Schema) -> Schema:
    content: Schema = {"application/json": {"schema": _ref(answer)}}
    if stream:
        content["text/event-stream"] = {"schema": {"description": f"with `stream`: {stream}"}}
    given = {"required": True, "content": {"application/json": {"schema": _ref(body.__name__)}}}
    return {"post": _operation(summary, content, *parameters) | {"requestBody": given}}


def _get(summary: str, answer: Schema, parameter: str = "", media_type: str = "application/json") -> Schema:
    described = [_parameter(parameter, "path", f"the {parameter}", TEXT)] if parameter else []
    return {"get": _operation(summary, {media_type: {"schema": answer}}, *described)}


def _operation(summary: str, content: Schema, *parameters: Schema) -> Schema:
    refused = {"application/json": {"schema": _ref("Error")}}
    responses = {"200": {"description": "the answer", "content": content}}
    responses |= {str(status): {"description": text, "content": refused} for status, text in REFUSALS.items()}
    return {"summary": summary, "parameters": [*parameters], "responses": responses}


def _parameter(name: str, place: str, description: str, schema: Schema) -> Schema:
    required = {"required": True} if place == "path" else {}
    return {"name": name, "in": place, "description": description, "schema": schema} | required


def _ref(name: str) -> Schema:
    return {"$ref": REFERENCES + name}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def _object(optional: Schema | None = None, **required: Schema) -> Schema:
    """An object of exactly these fields, of which those in `optional` may be missing."""
    fields = required | (optional or {})
    return {"type": "object", "properties": fields, "required": [*required], "additionalProperties": False}


def _choice(logprobs: Schema, **fields: Schema) -> Schema:
    """A choice in a chunk; the last one has the finish reason."""
    ending = {"finish_reason": _maybe(_FINISH), "logprobs": _maybe(logprobs)}
    return _object({"stop_reason": _ENDING["stop_reason"]}, index=COUNT, **ending, **fields)


_TOKEN = {"token": TEXT, "logprob": NUMBER, "bytes": _list(COUNT)}
_CHAT_LOGPROBS = _object(content=_list(_object(**_TOKEN, top_logprobs=_list(_object(**_TOKEN)))), refusal=NULL)
_TEXT_LOGPROBS = _object(
    tokens=_list(TEXT),
    token_logprobs=_list(_maybe(NUMBER)),
    top_logprobs=_list(_maybe({"type": "object", "additionalProperties": NUMBER})),
    text_offset=_list(COUNT),
)
_FINISH: Schema = {"enum": ["stop", "length", "tool_calls", "abort"]}
_ENDING = {"finish_reason": _FINISH, "stop_reason": {"type": ["string", "integer", "null"]}}
_USAGE = _object(
    {
        "completion_tokens_details": _object(reasoning_tokens=COUNT),
        "prompt_tokens_details": _object(cached_tokens=COUNT),
    },
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
)
_SPECULATIVE = _object(
    mean_acceptance_length=NUMBER,
    draft_acceptance_rate=NUMBER,
    acceptance_histogram=_list(COUNT),
    num_accepted_draft_tokens=COUNT,
    num_draft_tokens=COUNT,
    num_spec_steps=COUNT,
)
_METRICS = _object(speculative_decoding=_SPECULATIVE)
_WARNINGS = {"warnings": _list(TEXT)}
_FUNCTION = _object(name=TEXT, arguments=TEXT)
_CALL = _object(id=TEXT, type={"const": "function"}, function=_FUNCTION)
_REASONING = {"reasoning": _maybe(TEXT), "reasoning_content": _maybe(TEXT)}
_MESSAGE = _object(
    {"tool_calls": _list(_CALL)} | _REASONING, role={"const": "assistant"}, refusal=NULL, content=_maybe(TEXT)
)
_CALL_DELTA = _object(
    {"id": TEXT, "type": {"const": "function"}}, index=COUNT, function=_object({"name": TEXT}, arguments=TEXT)
)
_DELTA = _object({"role": {"const": "assistant"}, "content": TEXT, "tool_calls": _list(_CALL_DELTA)} | _REASONING)
_IDS = {"id": TEXT, "created": COUNT, "model": TEXT}
_CHUNK_FIGURES = {"usage": _maybe(_ref("Usage")), "metrics": ANYTHING} | _WARNINGS
_MODEL = _object(id=TEXT, object={"const": "model"}, created=COUNT, owned_by={"const": "bough"}, max_model_len=COUNT)
_VARIABLE: Schema = {
    "anyOf": [
        *(TEXT, FLAG, NULL, NUMBER | {"minimum": -MAX_NUMBER, "maximum": MAX_NUMBER}),
        _list(_ref("TemplateVariable")),
        {"type": "object", "additionalProperties": _ref("TemplateVariable")},
    ]
}
ANSWERS: Schema = {
    "TemplateVariable": _VARIABLE,  # of requests
    "Error": _object(error=_object(message=TEXT, type=TEXT, param=_maybe(TEXT), code=_maybe(TEXT))),
    "Usage": _USAGE,
    "ChatCompletion": _object(
        _WARNINGS,
        **_IDS,
        object={"const": "chat.completion"},
        choices=_list(_object(index=COUNT, message=_MESSAGE, logprobs=_maybe(_CHAT_LOGPROBS), **_ENDING)),
        usage=_ref("Usage"),
        metrics=_METRICS,
    ),
    "ChatCompletionChunk": _object(
        _CHUNK_FIGURES,
        **_IDS,
        object={"const": "chat.completion.chunk"},
        choices=_list(_choice(_CHAT_LOGPROBS, delta=_DELTA)),
    ),
    "Completion": _object(
        _CHUNK_FIGURES,
        **_IDS,
        object={"const": "text_completion"},
        choices=_list(_choice(_TEXT_LOGPROBS, text=TEXT)),
    ),
    "Models": _object(object={"const": "list"}, data=_list(_MODEL)),
    "Model": _MODEL,
    "Tokenized": _object({"token_strs": _list(TEXT)}, count=COUNT, max_model_len=COUNT, tokens=_list(COUNT)),
    "Detokenized": _object(prompt=TEXT),
    "ResponseEvent": {
        "type": "object",
        "properties": {"type": TEXT, "sequence_number": COUNT, "response": _ref("Response")},
        "required": ["type", "sequence_number"],
    },
}
_PARTS = {
    "output_text": _object(
        type={"const": "output_text"},
        text=TEXT,
        annotations=_list(ANYTHING),
        logprobs=_list(_object(**_TOKEN, top_logprobs=_list(_object(**_TOKEN)))),
    ),
    "reasoning_text": _object(type={"const": "reasoning_text"}, text=TEXT),
}
_STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete"]}
_ITEMS = [
    _object(
        id=TEXT, type={"const": "message"}, role={"const": "assistant"}, status=_STATUS,
        content=_list(_PARTS["output_text"]),
    ),
    _object(
        id=TEXT, type={"const": "reasoning"}, summary=_list(ANYTHING), status=_STATUS,
        content=_list(_PARTS["reasoning_text"]),
    ),
    _object(id=TEXT, type={"const": "function_call"}, status=_STATUS, call_id=TEXT, name=TEXT, arguments=TEXT),
]  # fmt: skip
_RESPONSE_USAGE = _object(
    input_tokens=COUNT,
    input_tokens_details=_object(cached_tokens=COUNT, cache_write_tokens=COUNT),
    output_tokens=COUNT,
    output_tokens_details=_object(reasoning_tokens=COUNT),
    total_tokens=COUNT,
)
ANSWERS["Response"] = _object(
    {"completed_at": COUNT, "metrics": _METRICS} | _WARNINGS,
    id=TEXT,
    object={"const": "response"},
    created_at=COUNT,
    status={"enum": ["in_progress", "completed", "incomplete", "cancelled", "failed"]},
    error=_maybe(ANYTHING),
    incomplete_details=_maybe(_object(reason=TEXT)),
    output=_list({"anyOf": _ITEMS}),
    usage=_maybe(_RESPONSE_USAGE),
    background={"const": False},
    instructions=_maybe(TEXT),
    max_output_tokens=_maybe(COUNT),
    metadata={"type": "object", "additionalProperties": TEXT},
    model=TEXT,
    parallel_tool_calls=FLAG,
    previous_response_id=NULL,
    reasoning=_object(effort=_maybe(TEXT), summary=NULL),
    store={"const": False},
    temperature=NUMBER,
    text=_object(format=ANYTHING),
    tool_choice={"type": ["string", "object"]},
    tools=_list(ANYTHING),
    top_logprobs=COUNT,
    top_p=NUMBER,
    truncation={"const": "disabled"},
    user=_maybe(TEXT),
)
