"""What objects of request bodies have in common: which fields they refuse, and which they accept and pass over."""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from bough.config.json_fields import must

# By the names of fields that are not supported: the values that ask for what happens anyway. Any other is refused.
Neutral = dict[str, tuple[object, ...]]


class Fields(BaseModel):
    """Refuses unknown fields by name, so that a misspelt field is not ignored silently."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    ignored: ClassVar[Set[str]] = frozenset()  # names of fields that have no influence on the answer
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _of_consequence(cls, data: Any) -> Any:
        return cls._kept(data) if isinstance(data, dict) else data

    @classmethod
    def _kept(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Drop what changes nothing, and nulls: some clients send every field they know, null where none is set."""
        given = {name: value for name, value in data.items() if value is not None and name not in cls.ignored}
        for name, neutral in cls.neutral.items():
            if name in given:
                _require_neutral(name, given.pop(name), neutral)
        return given


def _require_neutral(name: str, value: Any, neutral: tuple[object, ...]) -> None:
    if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
        alternative = f", or be {' or '.join(map(json.dumps, neutral))}" if neutral else ""
        problem = must(f"be left out{alternative}: it is not supported")
        raise ValidationError.from_exception_data(name, [{"type": problem, "loc": (name,), "input": value}])
