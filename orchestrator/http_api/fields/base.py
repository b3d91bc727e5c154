"""The base of objects in request bodies: the fields that they refuse, and those that they accept and ignore."""

from __future__ import annotations

import json
import logging
from collections.abc import Set
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from bough.config.json_fields import must
from orchestrator.http_api.fields.errors import shortened

logger = logging.getLogger(__name__)

# Clients' notes for themselves, for prompt caches and for other servers; they never change the answer.
HARMLESS = frozenset({"cache_control", "created_at", "createdAt", "id", "provider_specific_fields", "timestamp"})
EMPTY: tuple[object, ...] = ("", [], {}, False)  # values without effect
MAX_NOTED = 1024  # names that are logged
_NOTED: set[str] = set()  # unknown fields that were ignored and logged

# For unsupported fields, the values that request the default behaviour. All others are refused.
Neutral = dict[str, tuple[object, ...]]


class Fields(BaseModel):
    """Refuses unknown fields by name: misspelt fields must not be ignored silently.

    Those that are empty or known to be harmless are ignored, with one line in the log for each name.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    ignored: ClassVar[Set[str]] = frozenset()  # fields without influence on the answer
    neutral: ClassVar[Neutral] = {}
    known: ClassVar[Set[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _of_consequence(cls, data: Any) -> Any:
        return cls._kept(data) if isinstance(data, dict) else data

    @classmethod
    def _kept(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Drop fields without effect, and nulls: some clients send all fields, with null for unset ones."""
        given = {name: _whole(value) for name, value in data.items() if value is not None and name not in cls.ignored}
        for name, neutral in cls.neutral.items():
            if name in given:
                _require_neutral(name, given.pop(name), neutral)
        return {name: value for name, value in given.items() if name in cls.known or not _is_ignored(name, value)}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema of accepted objects: with null for any optional field, and with ignored fields."""
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        properties = schema.setdefault("properties", {})
        for name, inner in properties.items():
            inner.pop("title", None)
            if name not in schema.get("required", ()) and "null" not in json.dumps(inner.get("anyOf", "")):
                inner.pop("default", None)
                properties[name] = {"anyOf": [dict(inner), {"type": "null"}]}
        for name in HARMLESS | cls.ignored:
            properties.setdefault(name, {})
        for name, neutral in cls.neutral.items():
            properties[name] = {"enum": [*neutral, None]}
        schema["additionalProperties"] = {"enum": [*EMPTY, None]}
        return reference

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        """Note the names of the fields, as requests have them."""
        cls.known = {field.alias or name for name, field in cls.model_fields.items()}


def _whole(value: Any) -> Any:
    """A number without a fraction as an integer, as JSON Schema counts 7.0; also in lists."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and any(type(each) in (float, list) for each in value):
        return [_whole(each) for each in value]
    return value


def _is_ignored(name: str, value: Any) -> bool:
    """Whether an unknown field is ignored. Raises ValidationError for others: the first is enough for an error."""
    if name not in HARMLESS and not any(value == empty and type(value) is type(empty) for empty in EMPTY):
        raise field_error(name, value, "extra_forbidden")
    if (shown := shortened(name)) not in _NOTED and len(_NOTED) < MAX_NOTED:
        _NOTED.add(shown)
        logger.warning("requests have an unknown field %s; it is ignored, as it has no effect", shown)
    return True


def _require_neutral(name: str, value: Any, neutral: tuple[object, ...]) -> None:
    if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
        alternative = f", or be {' or '.join(map(json.dumps, neutral))}" if neutral else ""
        raise field_error(name, value, must(f"be left out{alternative}: it is not supported"))


def field_error(name: str, value: Any, problem: PydanticCustomError | str) -> ValidationError:
    """The error for a field, for validators of the whole object."""
    return ValidationError.from_exception_data(name, [{"type": problem, "loc": (name,), "input": value}])
