"""What an answer must be, as OpenAI's and vLLM's clients say it."""

from __future__ import annotations

from bough.protocol.generation import Constraint
from orchestrator.http_api.errors import invalid
from orchestrator.http_api.fields import GenerationFields, ResponseFormatFields, StructuredOutputsFields

ANY_OBJECT = Constraint(json_schema='{"type": "object"}', after_reasoning=True)


def constraint_of(fields: GenerationFields) -> Constraint | None:
    """The constraint of a completion's output; None leaves it free.

    Raises:
        ApiError: names the invalid field.
    """
    wanted = None if fields.response_format is None else _of_format(fields.response_format)
    return one_constraint("response_format", wanted, fields.structured_outputs)


def one_constraint(field: str, wanted: Constraint | None, vllm: StructuredOutputsFields | None) -> Constraint | None:
    """The constraint that this field demands, or vLLM's. Raises ApiError if both do, or vLLM's is invalid."""
    if vllm is None:
        return wanted
    if wanted is not None:
        raise invalid("structured_outputs", vllm.model_fields_set, f"be left out beside {field}")
    return _of_structure(vllm)


def constraint_names(
    vllm: StructuredOutputsFields | None,
    field: str = "response_format",
    schema: str = "response_format.json_schema.schema",
) -> dict[str, str]:
    """Names that the client knows, by those of `Constraint`, for error messages."""
    if vllm is None:
        return {"constraint.json_schema": schema, "constraint": field}
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
