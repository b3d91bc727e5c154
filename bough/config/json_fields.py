"""What pydantic refuses of a JSON text, in the words of bough's errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError


def must(text: str) -> PydanticCustomError:
    """An error for validators to raise; `text` says what a value must, such as "be a text"."""
    return PydanticCustomError("must", "{text}", {"text": text})


def first_refusal(error: ValidationError, shown: Callable[[object], str] = repr) -> tuple[str, str]:
    """The path of the first invalid field, empty for the whole, and what is wrong with it; `shown` quotes a value."""
    first: Any = error.errors(include_url=False)[0]
    match first["type"]:
        case "json_invalid":
            problem = f"no JSON: {first['ctx']['error']}"
        case "missing":
            problem = "missing; must be given"
        case "extra_forbidden" | "unexpected_keyword_argument":
            problem = "no such field; must be left out"
        case "value_error":
            problem = f"{first['ctx']['error']}"
        case "must":
            problem = f"must {first['msg']}, got {shown(first['input'])}"
        case _:
            must = re.sub("^(Input|List|String|Dictionary) should ", "", first["msg"]).partition(" after validation")[0]
            problem = f"must {must[:1].lower()}{must[1:]}, got {shown(first['input'])}"
    return _path(first["loc"]), problem


def _path(location: tuple[int | str, ...]) -> str:
    """A location as a person would write it: messages[0].content."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
