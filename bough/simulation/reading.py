"""Reading JSON values into frozen dataclasses, by pydantic; errors name the field."""

from __future__ import annotations

import itertools
import json
from typing import Annotated, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config

from bough.config.json_fields import first_refusal, must
from bough.errors import ConfigError

Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Points = tuple[tuple[Number, Number], ...]
Value = TypeVar("Value")


def _rising(points: Points) -> Points:
    if len(points) == 1:
        raise must("be empty, or have two points or more")
    for (rows, seconds), (next_rows, next_seconds) in itertools.pairwise(points):
        if next_rows <= rows or next_seconds < seconds:
            raise must(
                f"have rows that ascend and seconds that do not decrease: {next_rows:g}, {next_seconds:g} follow "
                f"{rows:g}, {seconds:g}"
            )
    return points


Curve = Annotated[Points, AfterValidator(_rising)]  # points [rows, seconds]

as_written = with_config(ConfigDict(extra="forbid", strict=True))  # of a dataclass: no field more, and no other types


def refusal(name: str, value: object, must_be: str) -> ConfigError:
    """The error for an invalid field, with what it must be and what it was."""
    return ConfigError(f"{name}: must be {must_be}, got {value!r}")


def read(kind: type[Value], name: str, value: object) -> Value:
    """A value of this kind from a JSON value. Raises ConfigError naming the first field that is invalid."""
    return read_text(kind, name, json.dumps(value))


def read_text(kind: type[Value], name: str, content: str) -> Value:
    """A value of this kind from a JSON text. Raises ConfigError naming the first field that is invalid."""
    try:
        return TypeAdapter(kind).validate_json(content)
    except ValidationError as exc:
        refused = first_refusal(exc)
        joined = ".".join(filter(None, (name, refused.field)))
        raise ConfigError(str(refused.named(joined or "profile"))) from exc
