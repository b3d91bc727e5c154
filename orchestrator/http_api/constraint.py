"""What an answer must be, as OpenAI's and vLLM's clients say it."""

from __future__ import annotations

from bough.protocol.generation import Constraint
from orchestrator.http_api.errors import invalid
from orchestrator.http_api.fields import GenerationFields, ResponseFormatFields, StructuredOutputsFields

ANY_OBJECT = Constraint(json_schema='{"type": "object"}', after_reasoning=True)


def constraint_of(fields: GenerationFields) -> Constraint | None:
    """The constraint of a request's output; None leaves it free.

    Raises:
        ApiError: names the invalid field.
    """
    wanted, vllm = fields.response_format, fields.structured_outputs
    if vllm is None:
        return None if wanted is None else _of_format(wanted)
    if wanted is not None and wanted.type != "text":
        raise invalid("structured_outputs", vllm.model_fields_set, "be left out beside response_format")
    return _of_structure(vllm)


def constraint_names(fields: GenerationFields) -> dict[str, str]:
    """Names that the client knows, by those of `Constraint`, for error messages."""
    if fields.structured_outputs is None:
        return {"constraint.json_schema": "response_format.json_schema.schema", "constraint": "response_format"}
    spelled = {"json_schema": "json", "choices": "choice", "lark": "grammar", "regex": "regex"}
    names = {f"constraint.{ours}": f"structured_outputs.{theirs}" for ours, theirs in spelled.items()}
    return names | {"constraint": "structured_outputs"}


def _of_format(wanted: ResponseFormatFields) -> Constraint | None:
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise invalid("response_format.json_schema", None, "be given with type json_schema")
        return Constraint(json_schema=wanted.json_schema.json_schema, after_reasoning=True)
    if wanted.json_schema is not None:
        raise invalid("response_format.json_schema", {}, "be left out unless type is json_schema")
    return None if wanted.type == "text" else ANY_OBJECT


def _of_structure(wanted: StructuredOutputsFields) -> Constraint:
    given = wanted.model_fields_set - ({"json_object"} if wanted.json_object is False else set())
    if len(given) != 1:
        raise invalid(
            "structured_outputs", sorted(given), "have exactly one of json, json_object, regex, choice, grammar"
        )
    if wanted.json_object:
        return ANY_OBJECT
    return Constraint(wanted.json_schema, wanted.regex, tuple(wanted.choice or ()), wanted.grammar, True)
