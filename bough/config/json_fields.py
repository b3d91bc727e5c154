"""Pydantic's validation errors of a JSON text, as bough's errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from bough.errors import InvalidRequest


def must(text: str) -> PydanticCustomError:
    """An error for validators to raise; `text` completes "must", such as "be a text"."""
    return PydanticCustomError("must", "{text}", {"text": text})


def first_refusal(error: ValidationError, shown: Callable[[object], str] = repr) -> InvalidRequest:
    """The error of the first invalid field, with its path (empty for the whole text); `shown` quotes a value."""
    first: Any = error.errors(include_url=False)[0]
    path = _path(first["loc"])
    match first["type"]:
        case "json_invalid":
            return InvalidRequest(path, f"invalid JSON: {first['ctx']['error']}")
        case "missing":
            return InvalidRequest(path, "missing; must be given")
        case "extra_forbidden" | "unexpected_keyword_argument":
            return InvalidRequest(path, "no such field; must be left out")
        case "value_error":
            return InvalidRequest(path, first["ctx"]["error"])
        case "must":
            must = first["msg"]
        case _:  # in pydantic's words
            must = first["msg"].rpartition(" should ")[2].partition(" after validation")[0]
    return InvalidRequest(path, f"must {must[:1].lower()}{must[1:]}", shown(first["input"]))


def _path(location: tuple[int | str, ...]) -> str:
    """A location as a person would write it: messages[0].content."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
