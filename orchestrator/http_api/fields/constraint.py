"""What an answer must be, as OpenAI's and vLLM's clients say it."""

from __future__ import annotations

from bough.protocol.generation import Constraint
from orchestrator.http_api.fields.errors import invalid
from orchestrator.http_api.fields.generation import GenerationFields, RequestFields, StructuredOutputsFields

_ANY_OBJECT = Constraint(json_schema='{"type": "object"}', after_reasoning=True)


def constraint_of(field: str, kind: str, schema: str | None, request: RequestFields) -> Constraint | None:
    """The constraint that `field` demands by its type and schema, or other servers'; None leaves the output free.

    Raises ApiError if both demand one, or the latter is invalid.
    """
    name, form = request.form
    if form is not None:
        if kind != "text":
            raise invalid(name, sorted(form.model_fields_set), f"be left out beside {field}")
        return _of_structure(form)
    if schema is not None:
        return Constraint(json_schema=schema, after_reasoning=True)
    return None if kind == "text" else _ANY_OBJECT


def response_constraint(fields: GenerationFields) -> Constraint | None:
    """The constraint of a chat's or a completion's output. Raises ApiError as `constraint_of`."""
    form = fields.response_format
    schema = None if form.json_schema is None else form.json_schema.json_schema
    return constraint_of("response_format", form.type, schema, fields)


def constraint_names(
    request: RequestFields,
    field: str = "response_format",
    schema: str = "response_format.json_schema.schema",
) -> dict[str, str]:
    """Names that the client knows, by those of `Constraint`, for error messages."""
    name, form = request.form
    if form is None:
        return {"constraint.json_schema": schema, "constraint": field}
    spelled = {"json_schema": "json", "choices": "choice", "lark": "grammar", "regex": "regex"}
    names = {ours: f"{name}.{theirs}" if name == "structured_outputs" else name for ours, theirs in spelled.items()}
    return {f"constraint.{ours}": field for ours, field in names.items()} | {"constraint": name}


def _of_structure(wanted: StructuredOutputsFields) -> Constraint:
    given = wanted.model_fields_set - ({"json_object"} if wanted.json_object is False else set())
    if len(given) != 1:
        raise invalid(
            "structured_outputs", sorted(given), "have exactly one of json, json_object, regex, choice, grammar"
        )
    if wanted.json_object:
        return _ANY_OBJECT
    return Constraint(wanted.json_schema, wanted.regex, tuple(wanted.choice or ()), wanted.grammar, True)
